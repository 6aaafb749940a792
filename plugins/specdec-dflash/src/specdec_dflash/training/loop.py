"""The training loop: read a few windows with the target, train on many blocks of them, report.

Matrices are trained by Muon (https://kellerjordan.github.io/posts/muon/), norms by AdamW. The rate
rises at the start, holds, and falls at the end.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Final

import mlx.core as mx
import mlx.optimizers as optim
from attrs import frozen
from mlx.nn.utils import value_and_grad
from mlx.utils import tree_flatten, tree_unflatten

from specdec.drafting.modules import load_module, parameters_of, without_drawing
from specdec.errors import ArtifactError
from specdec_dflash.model import BlockModel
from specdec_dflash.packagings import read_config
from specdec_dflash.training.blocks import block_loss, draw_blocks, lesson
from specdec_dflash.training.checkpoint import check_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from specdec.contract import HiddenTaps
    from specdec_dflash.training.data import TextWindows
    from specdec_dflash.training.settings import TrainSettings
    from specdec_dflash.training.teacher import Teacher

__all__ = ["Progress", "Trainer", "first_weights", "rate", "train"]

_WARM: Final = 0.02
_HELD: Final = 0.4
_LEAST: Final = 0.02
_INTO_RESIDUAL: Final = ("o_proj.weight", "down_proj.weight")


def rate(fraction: float) -> float:
    """The learning rate's share of its peak at a fraction of a run, 0.02 to 1."""
    if fraction < _WARM:
        return max(fraction / _WARM, _LEAST)
    return 1.0 if fraction < _HELD else max((1 - fraction) / (1 - _HELD), _LEAST)


def first_weights(model: BlockModel, seed: int, port: HiddenTaps) -> dict[str, mx.array]:
    """Weights to begin with.

    What a layer adds to the residual stream begins small, and so does the final norm: at a weight
    of one the target's head would be as sure as it is of its own hidden states, about nothing.

    Args:
        model: tells names and shapes.
        seed: of the draw.
        port: the target's head.
    """
    shapes = parameters_of(model)
    keys = mx.random.split(mx.random.key(seed), len(shapes))
    drawn = {}
    for (name, array), key in zip(sorted(shapes.items()), keys, strict=True):
        if array.ndim == 1:
            drawn[name] = mx.ones(array.shape)
            continue
        spread = 0.6 * array.shape[1] ** -0.5
        if name.endswith(_INTO_RESIDUAL):
            spread /= (2 * len(model.layers)) ** 0.5
        drawn[name] = spread * mx.random.normal(array.shape, key=key)
    anything = mx.random.normal((1, 64, model.norm.weight.size), key=mx.random.key(seed))
    spread = mx.std(port.logits(anything).astype(mx.float32))
    drawn["norm.weight"] = drawn["norm.weight"] / mx.maximum(spread, 1.0)
    return drawn


def _tree(model: Any) -> Any:
    return model.parameters()  # untyped in MLX


@frozen
class Progress:
    """How far a run is; loss and agreement are means since the last report.

    Attributes:
        step: steps done.
        seconds: that they took.
        fraction: of the run, 0 to 1.
        loss: nats.
        agreement: per slot, the share of blocks that expect what the target does, among those that
            the target would have written up to there.
    """

    step: int
    seconds: float
    fraction: float
    loss: float
    agreement: tuple[float, ...]


class Trainer:
    """A drafter in training.

    Args:
        teacher: its target.
        windows: the text.
        config: of the drafter, as it is written to ``config.json``.
        settings: of the run.

    Attributes:
        teacher: its target.
        model: its network.
        step: steps done.
        seconds: that they took.
        last_step_seconds: of the last of them; their mean where a run goes on.
    """

    def __init__(
        self,
        teacher: Teacher,
        windows: TextWindows,
        config: Mapping[str, Any],
        settings: TrainSettings,
    ) -> None:
        self.teacher, self._windows, self._settings = teacher, windows, settings
        self._config = read_config("the drafter in training", config)
        with without_drawing():
            self.model = BlockModel(self._config, own_embedding=False, own_head=False)
        first = first_weights(self.model, settings.seed, teacher.port)
        load_module("the drafter", self.model, first)
        self._optimizers: Any = [
            optim.Muon(learning_rate=settings.lr, weight_decay=0.0),
            optim.AdamW(learning_rate=settings.norm_lr, betas=[0.9, 0.95], weight_decay=0.0),
        ]
        self._optimizer: Any = optim.MultiOptimizer(
            self._optimizers, [lambda _name, weight: weight.ndim == 2]
        )
        self._optimizer.init(_tree(self.model))
        self._graded: Any = value_and_grad(self.model, self._loss)
        self.step = 0
        self.seconds = 0.0
        self.last_step_seconds = 0.0

    def _loss(self, given: Any) -> tuple[mx.array, mx.array]:
        return block_loss(self.model, given, self.teacher.port, self._settings)

    @property
    def fraction(self) -> float:
        """How much of the run is over, 0 to 1."""
        return self._settings.fraction(self.step, self.seconds)

    @property
    def is_over(self) -> bool:
        """Whether no step is left, or none that would end in time as the last one did."""
        return self.fraction >= 1.0 or not self._settings.fits(self.seconds, self.last_step_seconds)

    @property
    def _begun(self) -> dict[str, Any]:
        """What a run that goes on must be given again."""
        given = {"text": self._windows.identity, "dtype": self.teacher.dtype}
        return {**self._settings.kept, **given}

    def train_step(self) -> tuple[mx.array, mx.array, mx.array]:
        """One step.

        Returns:
            The loss, and per slot ``[S]`` the blocks that agree and those that were looked at.
        """
        settings, config = self._settings, self._config
        begun = time.monotonic()
        ids = self._windows.batch(self.step, settings.batch)
        key = mx.random.key(settings.seed << 32 | self.step)
        shape = (settings.batch, settings.blocks)
        blocks = draw_blocks(shape, settings.length, config.block_size, key)
        reading = self.teacher.read(ids, config.taps)
        given = lesson(reading, blocks, self.teacher.port, config.mask_token, settings.decay)
        (loss, agrees), gradients = self._graded(given)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)  # type: ignore[no-untyped-call]
        share = rate(self.fraction)
        for optimizer, peak in zip(self._optimizers, (settings.lr, settings.norm_lr), strict=True):
            optimizer.learning_rate = peak * share
        self._optimizer.update(self.model, gradients)
        looked = given.on_path.sum(0)
        mx.eval(_tree(self.model), self._optimizer.state, loss, agrees, looked)
        self.step += 1
        self.last_step_seconds = time.monotonic() - begun
        self.seconds += self.last_step_seconds
        return loss, agrees, looked

    # To stop and go on.

    def state(self) -> tuple[dict[str, mx.array], dict[str, str]]:
        """All that :meth:`restore` needs: arrays by name, and notes."""
        flat: Any = tree_flatten(self._optimizer.state)
        arrays = {f"model.{name}": array for name, array in parameters_of(self.model).items()}
        arrays |= {f"optimizer.{name}": array for name, array in flat}
        notes = {"step": str(self.step), "seconds": repr(self.seconds)}
        return arrays, {**notes, "settings": json.dumps(self._begun)}

    def restore(self, arrays: Mapping[str, mx.array], notes: Mapping[str, str]) -> None:
        """Go on from a state.

        Raises:
            ArtifactError: it is none of this drafter's.
            OptionError: the run was begun with other settings.
        """
        check_settings(notes, self._begun)
        weights = {n[6:]: array for n, array in arrays.items() if n.startswith("model.")}
        held = [(n[10:], array) for n, array in arrays.items() if n.startswith("optimizer.")]
        current: Any = tree_flatten(self._optimizer.state)
        shapes = {name: array.shape for name, array in current}
        if {name: array.shape for name, array in held} != shapes:
            raise ArtifactError(
                "the saved training state is another drafter's; begin anew elsewhere"
            )
        load_module("the drafter", self.model, weights)
        self._optimizer.state = tree_unflatten(held)
        self.step, self.seconds = int(notes["step"]), float(notes["seconds"])
        self.last_step_seconds = self.seconds / max(self.step, 1)


def train(
    trainer: Trainer,
    *,
    report: Callable[[Progress], None],
    report_every: int = 20,
    save: Callable[[], None],
    save_every: float = 120.0,
    stopped: Callable[[], bool] = lambda: False,
    first: Callable[[float], None] = lambda _: None,
) -> None:
    """Train to the end of the run, or until somebody stops it; saves in either case.

    Args:
        trainer: the drafter.
        report: is told the progress.
        report_every: steps.
        save: writes the drafter.
        save_every: seconds.
        stopped: asked after each step.
        first: is told the seconds of the first step.
    """
    losses: list[mx.array] = []
    agreed = looked_at = mx.zeros(())
    saved, begun = time.monotonic(), trainer.step
    while not trainer.is_over:
        loss, agrees, looked = trainer.train_step()
        if trainer.step == begun + 1:
            first(trainer.last_step_seconds)
        losses.append(loss)
        agreed, looked_at = agreed + agrees, looked_at + looked
        last = trainer.is_over or stopped()
        if last or trainer.step % report_every == 0:
            report(_progress(trainer, losses, agreed / mx.maximum(looked_at, 1)))
            losses, agreed, looked_at = [], mx.zeros(()), mx.zeros(())
        if last:
            break
        if time.monotonic() - saved > save_every:
            save()
            saved = time.monotonic()
    save()


def _progress(trainer: Trainer, losses: list[mx.array], agreement: mx.array) -> Progress:
    loss: Any = mx.mean(mx.stack(losses)).item()
    shares: Any = agreement.tolist()
    return Progress(trainer.step, trainer.seconds, trainer.fraction, loss, tuple(shares))
