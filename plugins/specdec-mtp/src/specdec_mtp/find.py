"""Where a checkpoint keeps its multi-token-prediction head, told from names alone.

A head of a few hundred megabytes is found among shards of hundreds of gigabytes by reading their
headers: no weight, and no MLX. The layouts are those that are published: whole releases in Hugging
Face's names, split releases of mlx-vlm, sidecar files, and vLLM's speculators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from specdec.errors import ArtifactError
from specdec.plugins.headers import INDEX, Header, Stored, read_header, read_index, read_object
from specdec_mtp.names import HeadKind, Layout, Names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

__all__ = ["HeadFiles", "HeadKind", "Layout", "Stored", "declared_layers", "find_head", "has_head"]

_SIDECARS: Final = ("mtp.safetensors", "model-mtp.safetensors")
_NESTED: Final = ("text_config", "transformer_layer_config")
_CONVOLUTION: Final = "linear_attn.conv1d.weight"
_LATER_LAYER: Final = re.compile(r"layers\.[1-9]")


@frozen(kw_only=True)
class HeadFiles:
    """A head that was found, by name; no weight of it has been read.

    Attributes:
        kind: which form it has.
        layout: how its tensors are named in the files.
        path: the folder or file it was found in.
        tensors: the head's tensors under names without prefix.
        config: the text config that describes it, with the outer one's entries behind its own.
        outer: the ``config.json`` that belongs to it, as it is.
        raw_trunk: whether the target's convolutions beside it are in Hugging Face's layout, which
            tells how all norm weights of that checkpoint are stored. ``None`` where the head has
            files of its own, or the target has no convolutions.
        from_mlx: whether all its files say that MLX wrote them.
    """

    kind: HeadKind
    layout: Layout
    path: Path
    tensors: Mapping[str, Stored]
    config: Mapping[str, Any]
    outer: Mapping[str, Any]
    raw_trunk: bool | None
    from_mlx: bool


def find_head(folder: Path, kind: HeadKind) -> HeadFiles:
    """Find the head of a checkpoint.

    The first of these places that holds one is taken, so what was put beside a release on purpose
    wins over what its shards have: the folder itself where it is a split release, a sub-folder
    ``mtp``, a sidecar file, the shards.

    Args:
        folder: a split release, or the target's folder.
        kind: the form that is looked for.

    Raises:
        ArtifactError: there is no head, only the declaration of one, one of several layers, or a
            file that it needs is missing or unreadable.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise ArtifactError(f"{folder} {what}; give the folder that holds config.json")
    found = _look(folder, kind)
    outer = _read_config(folder)
    declared = declared_layers(found.config if found else outer)
    later = sorted(name for name in found.tensors if _LATER_LAYER.match(name)) if found else []
    if declared > 1 or later:
        what = later[0] if later else f"{declared} prediction layers in its config"
        raise ArtifactError(
            f"{folder} has {what}; heads of more than one layer are not supported, choose another "
            "drafter (specdec plugins)"
        )
    if found is not None:
        return found
    other = HeadKind.NEXTN if kind is HeadKind.MTP else HeadKind.MTP
    if has_head(folder, other):
        raise ArtifactError(
            f"{folder} holds a head of the kind {other.value}, not {kind.value}; "
            f"name the kind {other.value}"
        )
    if declared:
        raise ArtifactError(
            f"{folder} declares a prediction layer in config.json, but no tensors of "
            f"{kind.a_head} are there; mlx-lm conversions leave them out: give the folder of "
            f"the split release, or put it at {folder / 'mtp'}"
        )
    raise ArtifactError(
        f"{folder} neither declares nor holds {kind.a_head}; give the folder of a split "
        "release, or choose another drafter (specdec plugins)"
    )


def has_head(folder: Path, kind: HeadKind) -> bool:
    """Whether a folder holds a head, for detection.

    A split release whose files are broken counts, so that loading it says what is wrong with it.
    """
    folder = Path(folder)
    try:
        return folder.is_dir() and _look(folder, kind) is not None
    except (ArtifactError, OSError):
        try:
            outer = _read_config(folder)
        except ArtifactError:
            return False
        key = "mtp_num_hidden_layers" if kind is HeadKind.MTP else "num_nextn_predict_layers"
        return _is_split(outer) and key in _described(outer)


def declared_layers(config: Mapping[str, Any]) -> int:
    """How many prediction layers a config declares, outside or in its text config; 0 if none."""
    levels = [config, *(config[key] for key in _NESTED if isinstance(config.get(key), Mapping))]
    keys = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
    counts = [level.get(key) for level in levels for key in keys]
    whole = [count for count in counts if isinstance(count, int) and not isinstance(count, bool)]
    return max((count for count in whole if count > 0), default=0)


@frozen
class _Source:
    """A place where a head may be; ``own`` where it would hold nothing else."""

    path: Path
    outer: Mapping[str, Any]
    own: bool


def _look(folder: Path, kind: HeadKind) -> HeadFiles | None:
    """The head in the first place that has one, whatever its number of layers."""
    for source in _sources(folder):
        found = _head_at(source, kind)
        if found is not None:
            return found
    return None


def _sources(folder: Path) -> Iterator[_Source]:
    """The places of a folder, in the order in which they are looked at."""
    outer = _read_config(folder)
    if _is_split(outer):
        yield _Source(folder, outer, own=True)
        return
    companion = folder / "mtp"
    if companion.is_dir():
        yield _Source(companion, _read_config(companion) or outer, own=True)
    extra = outer.get("mlx_lm_extra_tensors")
    named = extra.get("mtp_file") if isinstance(extra, Mapping) else None
    if named is not None:
        file = folder / str(named)
        if not file.is_file():
            raise ArtifactError(
                f"{file}, which config.json names as mtp_file, does not exist; download it"
            )
        yield _Source(file, outer, own=True)
    shards = set((read_index(folder) or {}).values())
    for name in _SIDECARS:
        if name not in shards and (folder / name).is_file():
            yield _Source(folder / name, outer, own=True)
    yield _Source(folder, outer, own=False)


def _head_at(source: _Source, kind: HeadKind) -> HeadFiles | None:
    """The head in one place, or ``None`` where no tensor joins embedding and hidden state."""
    config = _described(source.outer)
    layers = config.get("num_hidden_layers")
    own_type = source.own and "speculators_model_type" not in source.outer
    names = Names(kind, own=own_type, layers=layers if isinstance(layers, int) else None)
    headers, raw_trunk = _headers(source, lambda name: names.bare(name) is not None)
    stored = {}
    layouts = set()
    for header in headers:
        for name, where in header.tensors.items():
            found = names.bare(name)
            if found is not None:
                stored[found[0]] = where
                layouts.add(found[1])
    joint = "fc.weight" if kind is HeadKind.MTP else "eh_proj.weight"
    if joint not in stored:
        return None
    layout = next(one for one in (Layout.PREFIXED, Layout.NEXTN, Layout.SPLIT) if one in layouts)
    return HeadFiles(
        kind=kind,
        layout=layout,
        path=source.path,
        tensors=stored,
        config=config,
        outer=source.outer,
        raw_trunk=raw_trunk if layout is Layout.PREFIXED else None,
        from_mlx=all(header.from_mlx for header in headers),
    )


def _headers(source: _Source, wanted: Callable[[str], bool]) -> tuple[list[Header], bool | None]:
    """Headers of the files that hold wanted tensors, and how the trunk beside them is stored."""
    if source.path.is_file():
        return [read_header(source.path)], None
    index = read_index(source.path)
    if index is None:
        every = [read_header(file) for file in sorted(source.path.glob("*.safetensors"))]
        return [h for h in every if any(map(wanted, h.tensors))], _raw(every)
    named = {name: source.path / file for name, file in index.items() if wanted(name)}
    headers = [read_header(file) for file in sorted(set(named.values()))]
    have = set().union(*(header.tensors for header in headers))
    for name, file in named.items():
        if name not in have:
            raise ArtifactError(f"{file} lacks {name}, which {INDEX} says it has; download it")
    trunk = {file for name, file in index.items() if name.endswith(_CONVOLUTION)}
    return headers, _raw(_opened(headers, (source.path / file for file in sorted(trunk))))


def _opened(headers: Iterable[Header], others: Iterable[Path]) -> Iterator[Header]:
    """Headers at hand, then those of files that need not be readable."""
    yield from headers
    for file in others:
        try:
            yield read_header(file)
        except ArtifactError:
            continue


def _raw(headers: Iterable[Header]) -> bool | None:
    """Whether convolutions are [channels, 1, width], as Hugging Face stores them; as mlx-lm asks.

    The first file that has any answers for all.
    """
    for header in headers:
        shapes = [s.shape for name, s in header.tensors.items() if name.endswith(_CONVOLUTION)]
        if shapes:
            return any(shape[-1:] != (1,) for shape in shapes)
    return None


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    return read_object(file) if file.exists() else {}


def _described(outer: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text config where one is nested, with the outer entries behind its own."""
    nested: Mapping[str, Any] = next(
        (outer[key] for key in _NESTED if isinstance(outer.get(key), Mapping)), {}
    )
    return {**outer, **nested}


def _is_split(outer: Mapping[str, Any]) -> bool:
    kind = str(outer.get("model_type", ""))
    return kind.endswith("_mtp") or outer.get("speculators_model_type") == "mtp"
