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

    from specdec_dflash.training import Progress, Trainer, TrainSettings

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
    add("--steps", type=int, help="of the whole run, resumed or not (default: 2000, or --minutes)")
    add("--minutes", type=float, help="of the whole run, in place of steps or besides (no default)")
    add("--mask-token", type=int, help="id that fills a block (default: found)")
    dtypes = ("float32", "float16", "bfloat16")
    add("--dtype", choices=dtypes, help="of the target (default: as stored)")
    options: tuple[tuple[str, int | float | str, str], ...] = (
        ("--layers", 2, "of the drafter"),
        ("--taps", "auto", "layers of the target, such as 1,3,4, or auto"),
        ("--block", 16, "columns of a block; drafts are one fewer"),
        ("--batch", 4, "windows of text a step"),
        ("--length", 512, "tokens of a window"),
        ("--blocks", 32, "blocks that are trained in a window"),
        ("--lr", 0.02, "of the matrices (Muon)"),
        ("--norm-lr", 3e-3, "of the norms (AdamW)"),
        ("--decay", 6.0, "slots over which a slot's weight falls to 1/e"),
        ("--labels", "target", "learn the target's distribution, or the text's tokens (text)"),
        ("--seed", 0, "of the first weights, the order of the text and the blocks"),
        ("--report-every", 20, "steps between lines of progress"),
        ("--save-every", 2.0, "minutes between saves; 0 saves after each step"),
    )
    for name, default, what in options:
        add(name, type=type(default), default=default, help=f"{what} (default: {default})")
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
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        says = "the memory does not hold that; give fewer --layers, --batch, --length or --blocks"
        print(f"specdec_dflash.train: {says} ({one_line(error)})", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("specdec_dflash.train: interrupted", file=sys.stderr)
        return 130


def _run(args: argparse.Namespace) -> int:
    settings = _settings(args)
    if args.report_every < 1:
        raise OptionError(f"--report-every is {args.report_every}; give 1 or more")
    if not args.save_every >= 0:
        raise OptionError(f"--save-every is {args.save_every}; give minutes, 0 or more")
    _check_out(args.out, args.resume)
    trainer, config = _trainer(args, settings)
    args.out.mkdir(parents=True, exist_ok=True)  # what cannot be written is told before training
    asked = _Interrupt()
    with asked:
        _train(args, settings, trainer, config, asked)
    done = "stopped" if asked.came else "done"
    print(
        f"{done} after {trainer.step} steps, {trainer.seconds:.0f} s; the drafter is in {args.out}"
    )
    if asked.came:
        print("go on with the same options and --resume")
    return 130 if asked.came else 0


def _train(
    args: argparse.Namespace,
    settings: TrainSettings,
    trainer: Trainer,
    config: dict[str, Any],
    asked: _Interrupt,
) -> None:
    from specdec_dflash.training import agreement_of, save_drafter, save_state, train

    def save() -> None:
        save_drafter(args.out, config, trainer.model)
        save_state(args.out, *trainer.state())
        found = agreement_of(trainer.teacher, config, trainer.model)
        if found is not None:
            print(f"saved after {trainer.step} steps; the drafter {found}", flush=True)

    train(
        trainer,
        report=_report,
        report_every=args.report_every,
        save=save,
        save_every=60 * args.save_every,
        stopped=lambda: asked.came,
        first=lambda seconds: _tell_pace(settings, seconds),
    )


def _tell_pace(settings: TrainSettings, seconds: float) -> None:
    """Of the first step, which may have had more to set up than the others."""
    ends = []
    if settings.steps is not None:
        ends.append(f"{settings.steps} steps take {settings.steps * seconds / 60:.1f} minutes")
    if settings.minutes is not None:
        steps = int(60 * settings.minutes / max(seconds, 1e-9))
        ends.append(f"{settings.minutes:g} minutes are {steps} steps")
    print(f"the first step took {seconds:.1f} s; at that pace {', '.join(ends)}", flush=True)


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


def _trainer(args: argparse.Namespace, settings: TrainSettings) -> tuple[Trainer, dict[str, Any]]:
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
