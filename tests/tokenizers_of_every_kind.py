"""A small tokenizer for every kind of detokenizer that mlx-lm chooses, trained in memory."""

from __future__ import annotations

import json
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen
from mlx_lm import tokenizer_utils
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    NaiveStreamingDetokenizer,
    SPMStreamingDetokenizer,
    TokenizerWrapper,
)
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer, WordPieceTrainer
from transformers import PreTrainedTokenizerFast

import specdec_demo

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KINDS", "TEXTS", "Kind", "kind"]

TEXTS = (
    "Hello world, the quick brown fox. It 's here , is n't it ? We 're done !\n",
    "def f(x):\n    return x\n\n        # deep\n",
    "caf\u00e9 na\u00efve cafe\u0301 \u0161\u0142o",
    "\u4f60\u597d\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f600\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 ok \U0001f44d\U0001f3fd!",
    "  two  spaces   three <|im_end|> end\n",
)
# Trained on this, a tokenizer spells other scripts and emoji in bytes.
_SPELT = "Hello Hello world, the fox is here. It 's done , it is n't ! ab ab def return end two x"
_MARK = AddedToken("<|im_end|>", special=True, normalized=False)
_SPACED = AddedToken("<a b>", normalized=False)


@frozen(eq=False)
class Kind:
    """One kind.

    Attributes:
        tokenizer: wrapped as mlx-lm wraps it.
        plain: transformers' tokenizer.
        ids: all ids.
    """

    name: str
    tokenizer: Any
    plain: Any
    ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """A text's ids, without what a template would add."""
        return list(self.plain.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """transformers' one-shot text."""
        return str(self.plain.decode(list(ids)))

    def at_once(self, ids: Sequence[int]) -> str:
        """mlx-lm's one-shot text: its detokenizer, fed everything and finalized."""
        detokenizer = self.tokenizer.detokenizer
        for token in ids:
            detokenizer.add_token(token)
        detokenizer.finalize()
        return str(detokenizer.text)


def _byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    _train(made, trainer, _SPELT)
    return made


def _sentence_piece(*last: Any) -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    if last:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), made.normalizer])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    _train(made, BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False), _SPELT)
    # The bytes are pieces, not special tokens: what training made of them is undone.
    model = json.loads(made.to_str())
    model["added_tokens"] = model["added_tokens"][:1]
    made = Tokenizer.from_str(json.dumps(model))
    chain = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    made.decoder = decoders.Sequence(chain)
    return made


def _word_piece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]"]
    _train(made, WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False))
    return made


def _train(made: Tokenizer, trainer: Any, text: str | None = None) -> None:
    made.train_from_iterator([text] * 4 if text else list(TEXTS) * 4, trainer)


def _chosen(made: Tokenizer) -> Any:
    """The detokenizer that ``mlx_lm.tokenizer_utils.load`` would take."""
    decoder = json.loads(made.to_str())["decoder"]
    if tokenizer_utils._is_spm_decoder(decoder):
        return SPMStreamingDetokenizer
    if tokenizer_utils._is_spm_decoder_no_space(decoder):
        return partial(SPMStreamingDetokenizer, trim_space=False)
    if tokenizer_utils._is_bpe_decoder(decoder):
        return BPEStreamingDetokenizer
    return NaiveStreamingDetokenizer


def _wrap(name: str, made: Tokenizer, *, naive: bool = False, cleans: bool = False) -> Kind:
    made.add_tokens([_SPACED])
    made.add_special_tokens([_MARK])
    plain = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=made, clean_up_tokenization_spaces=cleans
    )
    detokenizer = NaiveStreamingDetokenizer if naive else _chosen(made)
    ids = tuple(range(len(plain)))
    return Kind(name, TokenizerWrapper(plain, detokenizer), plain, ids)


def _demo(name: str) -> Kind:
    folder = Path(specdec_demo.__file__).parent / "models" / name
    wrapped = tokenizer_utils.load(folder)
    plain = wrapped._tokenizer
    return Kind(name, wrapped, plain, tuple(range(len(plain))))


_STRIP = partial(decoders.Strip, " ", 1, 0)
# A bare tokenizer gets the naive detokenizer, whatever its decoder.
KINDS = {
    "byte-level": lambda: _wrap("byte-level", _byte_level()),
    "byte-level, naive": lambda: _wrap("byte-level, naive", _byte_level(), naive=True),
    "pieces": lambda: _wrap("pieces", _sentence_piece(_STRIP())),
    "pieces, no space": lambda: _wrap("pieces, no space", _sentence_piece()),
    "pieces, naive": lambda: _wrap("pieces, naive", _sentence_piece(_STRIP()), naive=True),
    "words": lambda: _wrap("words", _word_piece()),
    "words, cleaned": lambda: _wrap("words, cleaned", _word_piece(), cleans=True),
    "demo-qwen3": lambda: _demo("demo-qwen3"),
    "demo-qwen3_5": lambda: _demo("demo-qwen3_5"),
}


@cache
def kind(name: str) -> Kind:
    """One kind by name, made once."""
    return KINDS[name]()
