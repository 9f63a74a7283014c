"""The flags of sampling as options."""

from __future__ import annotations

from pagekv.client.cli.main import make_parser
from pagekv.client.cli.sampling_flags import options_of


def test_what_is_not_given_is_not_sent() -> None:
    args = make_parser().parse(["generate", "x", "--max-tokens", "3", "--top-k", "0", "--ignore-eos", "--timeout", "9"])
    assert options_of(args) == {"max_tokens": 3, "top_k": 0, "ignore_eos": True, "timeout": 9.0}
