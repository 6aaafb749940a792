"""``python -m specdec_dflash.train``: train a DFlash drafter for one's own target."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from specdec.errors import OptionError, SpecdecError, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec_dflash.training import Progress, TrainSettings

__all__ = ["build_parser", "main"]

_SHOWN = 8  # slots in a line of progress


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    parser = _Parser(prog="specdec_dflash.train", description="Train a DFlash drafter.")
    add = parser.add_argument
    add("--model", required=True, help="the target: a folder, a bundled model or a hub id")
    add("--text", required=True, type=Path, help="folder of .txt, .md, .py and .jsonl files")
    add("--out", required=True, type=Path, help="the drafter's folder")
    add("--resume", action="store_true", help="go on with what is in --out")
    add("--layers", type=int, default=2, help="of the drafter")
    add("--taps", default="auto", help="layers of the target, such as 1,3,4, or auto")
    add("--block", type=int, default=16, help="columns of a block; drafts are one fewer")
    add("--steps", type=int, help="all steps of the run, resumed ones included (default: 2000)")
    add("--minutes", type=float, help="all minutes of the run, in place of steps or besides")
    add("--batch", type=int, default=4, help="windows of text a step")
    add("--length", type=int, default=512, help="tokens of a window")
    add("--blocks", type=int, default=32, help="blocks that are trained in a window")
    add("--lr", type=float, default=0.02, help="of the matrices (Muon)")
    add("--norm-lr", type=float, default=3e-3, help="of the norms (AdamW)")
    add("--decay", type=float, default=6.0, help="slots over which a slot's weight falls to 1/e")
    add("--labels", default="target", help="learn the target's distribution, or the text's tokens")
    add("--mask-token", type=int, help="id that fills a block (default: found)")
    add("--dtype", choices=("float32", "float16", "bfloat16"), help="of the target")
    add("--seed", type=int, default=0)
    add("--report-every", type=int, default=20, help="steps between lines of progress")
    add("--save-every", type=float, default=2.0, help="minutes between saves")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: arguments; those of the process by default.

    Returns:
        0; 2 for a mistake of the user's, in one line; 130 where it was interrupted.
    """
    args = build_parser().parse_args(argv)
    try:
        return _run(args)
    except SpecdecError as error:
        print(f"specdec_dflash.train: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        what = error.strerror or type(error).__name__
        print(f"specdec_dflash.train: {what}: {one_line(error.filename)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specdec_dflash.train: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    _check_out(args.out, args.resume)
    trainer, config = _trainer(args, settings)
    args.out.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before training
    from specdec_dflash.training import save_drafter, save_state, train

    def save() -> None:
        save_drafter(args.out, config, trainer.model)
        save_state(args.out, *trainer.state())

    asked = _Interrupt()
    with asked:
        train(
            trainer,
            report=_report,
            report_every=max(args.report_every, 1),
            save=save,
            save_every=60 * args.save_every,
            stopped=lambda: asked.came,
        )
    done = "stopped" if asked.came else "done"
    print(
        f"{done} after {trainer.step} steps, {trainer.seconds:.0f} s; the drafter is in {args.out}"
    )
    if asked.came:
        print("go on with the same options and --resume")
    return 130 if asked.came else 0


def _settings(args: argparse.Namespace) -> TrainSettings:
    from specdec_dflash.training import TrainSettings

    same = ("layers", "block", "minutes", "batch", "length", "blocks", "lr", "norm_lr", "decay")
    given: dict[str, Any] = {name: getattr(args, name) for name in (*same, "labels", "seed")}
    steps = 2000 if args.steps is None and args.minutes is None else args.steps
    return TrainSettings(**given, steps=steps, taps=_taps(args.taps), mask_token=args.mask_token)


def _taps(text: str) -> tuple[int, ...] | None:
    if text == "auto":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise OptionError(
            f"--taps is {one_line(text)}; give layers such as 1,3,4, or auto"
        ) from None


def _check_out(out: Path, resume: bool) -> None:
    if out.is_file():
        raise OptionError(f"--out {out} is a file; give a folder")
    if out.is_dir() and any(out.iterdir()) and not resume:
        raise OptionError(f"--out {out} is not empty; give --resume, or another folder")


def _trainer(args: argparse.Namespace, settings: TrainSettings) -> tuple[Any, dict[str, Any]]:
    from specdec.models import load_model
    from specdec_dflash.training import (
        Teacher,
        TextWindows,
        Trainer,
        describe,
        load_state,
        read_tokens,
    )
    from specdec_dflash.training.checkpoint import read_described
    from specdec_dflash.training.teacher import find_mask_token, spread_taps

    model, tokenizer = load_model(args.model)
    if args.dtype:
        import mlx.core as mx

        model.set_dtype(getattr(mx, args.dtype))
    teacher = Teacher(model, tokenizer)
    taps = spread_taps(teacher.port.layer_count) if settings.taps is None else settings.taps
    teacher.check_taps(taps)
    mask = find_mask_token(tokenizer, teacher.vocab_size, settings.mask_token)
    config = describe(teacher, settings, taps, mask)
    state = None
    if args.resume:
        read_described(args.out, config)
        state = load_state(args.out)
    tokens = read_tokens(args.text, tokenizer, teacher.vocab_size)
    windows = TextWindows(tokens, settings.length, settings.seed)
    trainer = Trainer(teacher, windows, config, settings)
    if state is not None:
        trainer.restore(*state)
    print(f"{windows.tokens} tokens of text; taps {', '.join(map(str, taps))}; mask {mask}")
    return trainer, config


def _report(progress: Progress) -> None:
    shares = " ".join(f"{share:.0%}" for share in progress.agreement[:_SHOWN])
    slots = len(progress.agreement)
    of = f"slots 1 to {min(_SHOWN, slots)} of {slots}"
    print(
        f"step {progress.step}, {progress.seconds:.0f} s, {progress.fraction:.0%}: "
        f"loss {progress.loss:.3f}, agrees {shares} ({of})",
        flush=True,
    )


class _Interrupt:
    """Turns the first Ctrl-C into a wish to stop after the step; the second one interrupts."""

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGINT, self._note)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _note(self, _number: int, _frame: object) -> None:
        self.came = True
        signal.signal(signal.SIGINT, self._before)


if __name__ == "__main__":
    sys.exit(main())
