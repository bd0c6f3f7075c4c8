"""docs/vllm.md says what each refusal means, docs/operating.md what the tools add."""

from __future__ import annotations

import re

import pytest

from tests.vllm.client import ROOT


def test_every_reason_is_explained() -> None:
    table = (ROOT / "crates/kvpd/src/reason.rs").read_text()
    codes = set(re.findall(r'^    [A-Z]\w+ "([a-z-]+)" "\w+"$', table, re.M))
    judgement = (ROOT / "python/kvpd/vllm/judgement.py").read_text()
    codes |= set(re.findall(r'code="([a-z-]+)"', judgement))
    assert len(codes) > 30
    explained = (ROOT / "docs/vllm.md").read_text()
    assert [code for code in sorted(codes) if f"`{code}`" not in explained] == []


# Where `inspect` and `check` take codes from that no handshake has.
CODES_OF_TOOLS = {
    "cli/check/outcome.py": (r'Finding\(\s*"([a-z-]+)"', {"block-bytes", "pages-unknown"}),
    "cli/check/kernels.py": (r'\("([a-z]+-[a-z-]+)"', {"kernel-unknown"}),
    "cli/inspect/engine.py": (r'code="([a-z-]+)"', {"no-such-rank", "unknown-tp-size"}),
    "vllm/stock.py": (r'Veto\(\s*"([a-z-]+)"', {"stock-digest", "stock-region-names"}),
    "convert/axes.py": (r'code="([a-z-]+)"', {"short-run"}),
    "convert/components.py": (r'code="([a-z-]+)"', {"components-differ"}),
    "convert/plan.py": (r'code="([a-z-]+)"', {"page-too-long"}),
}


@pytest.mark.parametrize("path", CODES_OF_TOOLS)
def test_every_code_of_the_tools_is_explained(path: str) -> None:
    pattern, some = CODES_OF_TOOLS[path]
    codes = set(re.findall(pattern, (ROOT / "python/kvpd" / path).read_text()))
    assert some <= codes
    explained = (ROOT / "docs/operating.md").read_text()
    assert [code for code in sorted(codes) if f"`{code}`" not in explained] == []
