"""A check that tests of linear layers share."""

from __future__ import annotations

from typing import Any

import torch


def check_compiled_whole(layer: Any, in_features: int) -> None:
    """Compiles a bfloat16 layer as vLLM does: as one graph without breaks, for any number of tokens. Its results must be the eager
    layer's."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: layer(x)[0], backend=backend, fullgraph=True)
    for tokens in (3, 7, 12):
        x = torch.randn(tokens, in_features, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), layer(x)[0])
    assert len(graphs) == 1
