"""The plugin module and the provider: options, identity, and no MLX before ``load``."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import pytest

from specdec.contract import validate_provider
from specdec.errors import OptionError
from specdec.plugins import SUPPORTED_API, DraftKind, LoadedDraft, LoadRequest, make_manager
from specdec.testing import TinyTarget
from specdec_ngram import plugin
from specdec_ngram.provider import NgramProvider


def load(width: int | None = None, **options: Any) -> LoadedDraft:
    return plugin.load(
        LoadRequest(kind="ngram", target=TinyTarget(), num_draft_tokens=width, options=options)
    )


def test_the_module_registers_its_one_kind() -> None:
    manager = make_manager()
    manager.register(plugin)
    manager.check_pending()
    (kinds,) = manager.hook.specdec_draft_kinds()
    (kind,) = kinds
    assert isinstance(kind, DraftKind)
    assert (kind.name, kind.artifact, kind.detect, kind.fallback) == ("ngram", False, None, False)
    assert kind.default_width is None, "it depends on the device"
    assert kind.summary
    assert plugin.specdec_api in SUPPORTED_API


def test_the_kind_is_listed_on_a_host_without_mlx() -> None:
    code = (
        "import sys\n"
        "for name in ('mlx', 'mlx.core', 'mlx_lm', 'transformers'): sys.modules[name] = None\n"
        "from specdec_ngram import plugin\n"
        "print(plugin.specdec_draft_kinds()[0].name)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ngram"


def test_the_default_width_is_used_only_where_none_is_asked_for() -> None:
    with mock.patch.object(mx, "default_device", return_value=mx.Device(mx.cpu)):
        assert load().num_draft_tokens == plugin.CPU_WIDTH
    with mock.patch.object(mx, "default_device", return_value=mx.Device(mx.gpu)):
        assert load().num_draft_tokens == plugin.GPU_WIDTH
    assert load(1).num_draft_tokens == 1
    assert load(12).num_draft_tokens == 12


def test_the_options_reach_the_provider() -> None:
    provider = load(max_ngram=6, min_ngram=2).provider
    assert provider.grouped.checkpoint_namespace == "ngram-history-v1:max6:min2"


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(OptionError, match="ngram has no option max_gram, window"):
        load(window=3, max_gram=2)


@pytest.mark.parametrize("options", [{"max_ngram": 0}, {"min_ngram": "1"}, {"min_ngram": 9}])
def test_a_bad_value_is_refused_in_one_line(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as raised:
        load(**options)
    assert next(iter(options)) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_provider_has_every_member_and_no_weights() -> None:
    provider = load().provider
    validate_provider(provider, "specdec-ngram")
    assert (provider.id, provider.weight_bytes) == ("ngram", 0)
    assert provider.grouped.supports_adapters
    provider.close()
    provider.close()


def test_the_namespace_is_stable_and_different_for_other_settings() -> None:
    names = [
        NgramProvider(max_ngram=longest, min_ngram=shortest).grouped.checkpoint_namespace
        for longest, shortest in ((3, 1), (3, 2), (4, 1), (31, 1), (3, 1))
    ]
    assert names[0] == names[-1] == "ngram-history-v1:max3:min1"
    assert len(set(names)) == 4


def test_the_example_in_the_readme_runs() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    result = doctest.testfile(str(readme), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0
