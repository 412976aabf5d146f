"""An export carries the chat template that the model was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

import hflow
from hflow.diagnostics import HflowError
from hflow.runtime.exported_template import exported_template

GRAPH = "examples/math_chat/math_chat.yaml"


def test_a_file_that_the_data_node_names(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{{ messages }}")
    chosen = f"nodes.prompts.with.chat_template={file}"
    graph = hflow.load(GRAPH, chosen)
    assert exported_template(graph) == {"chat_template.jinja": "{{ messages }}"}
    file.unlink()
    with pytest.raises(HflowError, match="HF406.*mine.jinja"):
        exported_template(graph)


@pytest.mark.parametrize("overrides", [[], ["nodes.prompts.with.chat_template=tool_use"]])
def test_the_tokenizers_own_goes_with_it_anyhow(overrides: list[str]) -> None:
    assert exported_template(hflow.load(GRAPH, overrides)) == {}
