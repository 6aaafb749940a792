"""What a ``dspark.json`` says, and the tensors that it promises; no weight is read.

The format is that of modules that somebody has trained for one target
(https://github.com/joshuarossi/mlx-bun). Its variants ``dspark`` and the older ``dflash`` name one
network. Which of the parts that can be left out a file has, ``param_names`` says: a ``dflash``
module may come without the sequential head, and then has no confidence either.

Shapes: H hidden size, m tapped layers, d width of the drafter, r rank, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from specdec.errors import ArtifactError, one_line
from specdec.plugins.config_keys import Keys
from specdec_dflash.confidence import read_thresholds
from specdec_dflash.packagings import MOST_COLUMNS, MOST_LAYERS

if TYPE_CHECKING:
    from collections.abc import Collection

    from specdec_dflash.files import DrafterFiles

__all__ = ["CONFIG_NAME", "DsparkConfig", "check_tensors", "read_dspark"]

CONFIG_NAME: Final = "dspark.json"
"""The file that describes such a drafter."""

_VARIANTS: Final = ("dspark", "dflash")
_SEQUENTIAL: Final = ("markov.w1", "markov.w2")
_CONFIDENCE: Final = ("conf.w", "conf.b")
_RECURRENT: Final = ("rnn.wH", "rnn.bH", "rnn.wO")
_SINGLE_VECTOR: Final = ("ctx_proj", "pos_emb")


@frozen(kw_only=True)
class DsparkConfig:
    """A drafter of this format.

    Attributes:
        hidden_size: H of its target.
        vocab_size: V of its target.
        eps: of its norms.
        gamma: columns of a block, each of which drafts.
        width: d.
        layers: number of its layers.
        heads: of its attention.
        inner: width of its MLP.
        rank: r; 0 without a sequential head.
        recurrent: whether the sequential head keeps a state over the block.
        confidence: whether it tells how sure it is.
        taps: of the target, in order; the number of its layers is the output of its final norm.
        thresholds: per slot, of a calibration, or ``None``.
        from_anchor: whether the first column drafts; it does, but the probe tries both.
    """

    hidden_size: int
    vocab_size: int
    eps: float
    gamma: int
    width: int
    layers: int
    heads: int
    inner: int
    rank: int
    recurrent: bool
    confidence: bool
    taps: tuple[int, ...] = field(converter=tuple[int, ...])
    thresholds: tuple[float, ...] | None = None
    from_anchor: bool = True

    @property
    def longest(self) -> int:
        """The most drafts of a block."""
        return self.gamma if self.from_anchor else self.gamma - 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that is read, as it is stored: matrices are ``[in, out]``."""
        d, h = self.width, self.hidden_size
        found: dict[str, tuple[int, ...]] = {
            "W_c": (len(self.taps) * h, d),
            "ctx_norm": (d,),
            "tok_proj": (h, d),
            "block_pos": (self.gamma, d),
            "out_norm": (d,),
            "out_proj": (d, h),
        }
        if self.gamma > 1:
            found["mask_emb"] = (self.gamma - 1, d)
        for number in range(self.layers):
            at = f"bb.{number}."
            found |= {f"{at}{name}": (d,) for name in ("attn_norm", "ff_norm")}
            found |= {f"{at}{name}": (d, d) for name in ("q", "k", "v", "o")}
            found |= {f"{at}{name}": (d, self.inner) for name in ("gate", "up")}
            found[f"{at}down"] = (self.inner, d)
        if self.rank:
            found["markov.w1"] = (self.vocab_size, self.rank)
            if self.recurrent:
                found["rnn.wH"] = (self.rank, self.rank)
                found["rnn.bH"] = (self.rank,)
                found["rnn.wO"] = (self.rank, self.vocab_size)
            else:
                found["markov.w2"] = (self.rank, self.vocab_size)
        if self.confidence:
            found |= {"conf.w": (d + self.rank, 1), "conf.b": (1,)}
        return found

    @property
    def unread(self) -> frozenset[str]:
        """Tensors that such a file may hold, and that nothing is computed with."""
        names = set() if self.gamma > 1 else {"mask_emb"}
        if self.recurrent:
            names.add("markov.w2")  # stored beside the head that replaces it
        return frozenset(names)


def read_dspark(files: DrafterFiles, *, calibrated: bool = True) -> DsparkConfig:
    """What a ``dspark.json`` says.

    Args:
        files: of the drafter; of its tensors, the names are read.
        calibrated: whether thresholds of a calibration are read.

    Raises:
        ArtifactError: a key is missing, says something that is not supported, or contradicts
            another; names it.
    """
    where = f"{files.path / CONFIG_NAME}"
    top = Keys(where, files.config)
    top.one_of("kind", ("dspark-drafter",))
    if not top.has("variant"):
        raise _single_vector(where, "there is no variant")
    variant = top.one_of("variant", _VARIANTS)
    top.count("version", 1)
    config, dims = top.level("config"), top.level("dims")
    for key, level in (("config", config), ("dims", dims)):
        if not level:
            raise top.wrong(key, "an object with the drafter's settings")
    keys = Keys(where, config, dims, files.config)
    width, heads = keys.count("dDraft"), keys.count("nHeads")
    if width % heads:
        raise keys.wrong("nHeads", f"a divisor of dDraft {width}")
    names = _names(top, files)
    gamma, taps = keys.count("gamma", most=MOST_COLUMNS), keys.counts("tapLayers")
    if len(set(taps)) < len(taps):
        raise keys.wrong("tapLayers", "layers that are named once each")
    return DsparkConfig(
        hidden_size=keys.count("hiddenSize"),
        vocab_size=keys.count("vocabSize"),
        eps=keys.number("eps", above=0),
        gamma=gamma,
        width=width,
        layers=keys.count("nLayers", most=MOST_LAYERS),
        heads=heads,
        inner=width * keys.count("ffMult"),
        taps=taps,
        thresholds=_thresholds(where, keys, names, gamma) if calibrated else None,
        **_parts(keys, variant, names),
    )


def _names(top: Keys, files: DrafterFiles) -> frozenset[str]:
    """The names that ``param_names`` lists, which are those of the file."""
    stored = frozenset(files.tensors)
    listed = top.get("param_names")
    if listed is None:
        return stored
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
        raise top.wrong("param_names", "a list of names")
    names = frozenset(listed)
    for name in sorted(names ^ stored):
        says = "lists" if name in names else "does not list"
        has = "has" if name in stored else "has no"
        raise ArtifactError(
            f"{files.path / CONFIG_NAME}: param_names {says} {name}, but the safetensors file "
            f"{has} {'it' if name in stored else 'such tensor'}; give a complete release"
        )
    return names


def _parts(keys: Keys, variant: str, names: Collection[str]) -> dict[str, Any]:
    """The parts that a module may come without."""
    sequential = "markov.w1" in names
    if not sequential and variant == "dspark":
        raise keys.wrong("variant", "dflash, as there is no markov.w1")
    seq_head = keys.one_of("seqHead", ("markov", "rnn"), "markov")
    recurrent = [name for name in _RECURRENT if name in names]
    if seq_head == "rnn" and (len(recurrent) < len(_RECURRENT) or not sequential):
        missing = [name for name in ("markov.w1", *_RECURRENT) if name not in names]
        raise keys.wrong("seqHead", f"markov, as there is no {missing[0]}")
    if seq_head == "markov" and recurrent:
        raise keys.wrong("seqHead", f"rnn, as there is {recurrent[0]}")
    confidence = "conf.w" in names
    if confidence and not sequential:
        raise keys.wrong("markovRank", "of markov.w1, which conf.w needs and the file has not")
    if not confidence and variant == "dspark":
        raise keys.wrong("variant", "dflash, as there is no conf.w")
    return {
        "rank": keys.count("markovRank") if sequential else 0,
        "recurrent": seq_head == "rnn",
        "confidence": confidence,
    }


def _thresholds(
    where: str, keys: Keys, names: Collection[str], gamma: int
) -> tuple[float, ...] | None:
    """Those of a calibration."""
    if not keys.has("sts"):
        return None
    found = keys.level("sts").get("thresholds")
    if "conf.w" not in names:
        raise keys.wrong("sts", "absent, as there is no conf.w")
    return read_thresholds(where, "sts.thresholds", found, gamma)


def check_tensors(files: DrafterFiles, config: DsparkConfig) -> None:
    """Check that the file holds what its config promises, in the shapes that follow from it.

    Raises:
        ArtifactError: a tensor is missing, unknown or of another shape; names it.
    """
    where, stored = files.path, files.tensors
    wanted = config.shapes()
    old = [name for name in _SINGLE_VECTOR if name in stored]
    if old and "W_c" not in stored:
        raise _single_vector(f"{where / CONFIG_NAME}", f"there is {old[0]} in place of W_c")
    for name in sorted(set(wanted) - set(stored)):
        raise ArtifactError(f"{where} has no tensor {name}; give a complete release")
    for name in sorted(set(stored) - set(wanted) - config.unread):
        raise ArtifactError(
            f"{where} has a tensor {name}, which {CONFIG_NAME} has no place for; give an intact "
            "release"
        )
    for name, shape in wanted.items():
        if stored[name].shape == shape:
            continue
        if name == "W_c" and stored[name].shape[0] == config.hidden_size:
            count = len(config.taps)
            raise _single_vector(
                f"{where / CONFIG_NAME}",
                f"W_c is of one layer of hiddenSize {config.hidden_size}, tapLayers of {count}",
            )
        raise ArtifactError(
            f"{where}: {name} has shape {_shown(stored[name].shape)}, but {CONFIG_NAME} needs "
            f"{_shown(shape)} (stored [in, out]); give an intact release"
        )


def _single_vector(where: str, why: str) -> ArtifactError:
    return ArtifactError(
        f"{where}: {one_line(why)}: this is a first version, of a single context vector, which no "
        "text is drafted with any more; train it again, with tapLayers"
    )


def _shown(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"
