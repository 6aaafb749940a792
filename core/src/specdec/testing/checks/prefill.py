"""Reading prompts."""

from __future__ import annotations

from functools import partial
from itertools import product

import mlx.core as mx
from hypothesis import strategies as st

from specdec.contract import ContextKind
from specdec.errors import ContractError
from specdec.testing.driven import DrivenRow, Kept
from specdec.testing.expect import must_raise
from specdec.testing.kit import Kit, check
from specdec.testing.strategies import row_ids


@check()
def prefill_in_chunks_equals_prefill_at_once(kit: Kit) -> None:
    """However a prompt is cut into chunks, the row drafts the same."""

    def run(prompt: list[int], cuts: list[int], pending: tuple[int, ...]) -> None:
        whole = kit.cold(prompt)
        places = sorted({cut for cut in cuts if 0 < cut < len(prompt)})
        row = DrivenRow()
        with kit.prefill_group([None]) as group:
            for start, end in zip([0, *places], [*places, len(prompt)], strict=True):
                kit.read(group, [row], [prompt[start:end]])
            chunked = Kept(group.capture(0), row)
        for head in sorted(set(pending)):
            with kit.open([whole, chunked]) as rows:
                one, other = rows.draft((head, head), (kit.max_depth,) * 2)
            assert one == other, (
                f"read at once the row drafts {list(one)}, in chunks cut at {places} it drafts "
                f"{list(other)}"
            )

    kit.examples(
        run,
        prompt=st.lists(st.integers(0, kit.vocab_size - 1), min_size=2, max_size=12),
        cuts=st.lists(st.integers(1, 11), max_size=4),
        pending=row_ids(kit),
    )


@check()
def prompts_read_together_equal_prompts_read_alone(kit: Kit) -> None:
    """Rows of one prefill group do not meet, whoever joins it or leaves it meanwhile."""

    def run(prompts: list[list[int]], late: int, gone: int, pending: tuple[int, ...]) -> None:
        width = min(map(len, prompts))
        rows = [DrivenRow() for _ in prompts]
        with kit.prefill_group([None] * len(rows)) as group:
            kit.read(group, rows, [prompt[:1] for prompt in prompts])
            if len(rows) > 1:
                keep = [row for row in range(len(rows)) if row != gone % len(rows)][::-1]
                group.filter_rows(keep)
                rows = [rows[row] for row in keep]
                prompts = [prompts[row] for row in keep]
            if late:
                # A row joins, cold or with what it has read elsewhere.
                other = kit.cold(prompts[0][:1])
                group.prepare_append([other.checkpoint if late == 1 else None]).commit()
                rows.append(other.row if late == 1 else DrivenRow())
                prompts = [*prompts, prompts[0]]
            kit.read(group, rows, [prompt[1:width] for prompt in prompts])
            assert group.row_count == len(rows)
            kept = [Kept(group.capture(place), row.copy()) for place, row in enumerate(rows)]
        for (place, held), head in product(enumerate(kept), sorted(set(pending))):
            with kit.open([held]) as lone:
                [draft] = lone.draft((head,), (kit.max_depth,))
                alone = kit.next_of(held.row, head, kit.max_depth)
                assert draft == alone, (
                    f"row {place} of {len(kept)}, which read {held.row.tokens} beside others, "
                    f"drafts {list(draft)}; read alone it drafts {list(alone)}"
                )

    ids = st.integers(0, kit.vocab_size - 1)
    kit.examples(
        run,
        prompts=st.lists(
            st.lists(ids, min_size=2, max_size=8), min_size=1, max_size=max(1, kit.max_rows - 1)
        ),
        late=st.integers(0, 2),
        gone=st.integers(0, 3),
        pending=row_ids(kit),
    )


@check()
def prefill_refuses_wrong_shapes(kit: Kit) -> None:
    """Chunks for another number of rows, or without the declared context, change nothing."""
    row = DrivenRow()
    with kit.prefill_group([None]) as group:
        kit.read(group, [row], [(0, 1)])
        pair = kit.context([(0, 1), (0, 1)], [(1,), (1,)], 1)
        one = kit.context([(0, 1)], [(1,)], 1)
        wrong = [(mx.array([[1], [1]], mx.int32), pair)]
        if kit.kind is not ContextKind.NONE:
            wrong.append((mx.array([[1]], mx.int32), None))
        else:
            wrong.append((mx.array([[1]], mx.int32), mx.zeros((1, 1, 4))))
        for tokens, context in wrong:
            must_raise(
                ContractError,
                partial(group.prefill, tokens, context),
                f"prefill() of tokens {tokens.shape} with a context of "
                f"{None if context is None else context.shape}, for one row,",
            )
        group.prefill(mx.array([[1]], mx.int32), one)
        assert group.capture(0).processed_tokens == 3


@check()
def materialize_keeps_what_was_restored(kit: Kit) -> None:
    """A row restored into a prefill group reads on as if it had never left."""

    def run(prompt: list[int], cut: int, pending: tuple[int, ...]) -> None:
        cut = min(cut, len(prompt) - 1)
        first = kit.cold(prompt[:cut])
        row = first.row.copy()
        with kit.prefill_group([first.checkpoint]) as group:
            group.materialize()
            group.materialize()
            kit.read(group, [row], [prompt[cut:]])
            held = Kept(group.capture(0), row)
        with kit.open([held]) as lone:
            [draft] = lone.draft(pending, (kit.max_depth,))
            assert draft == kit.next_of(row, pending[0], kit.max_depth)

    kit.examples(
        run,
        prompt=st.lists(st.integers(0, kit.vocab_size - 1), min_size=2, max_size=12),
        cut=st.integers(1, 11),
        pending=row_ids(kit),
    )
