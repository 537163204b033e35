"""Memory layout of tensors that pass from stage to stage."""

import pytest
import torch

from samestep.strategies.pipeline.stage_messages import layout_of, with_layout

VALUES = torch.arange(120.0).view(4, 5, 6)
FORMS = {
    "contiguous": VALUES,
    "transposed": VALUES.transpose(0, 2),
    "unaligned": VALUES[1:],
    "with gaps": VALUES[:, ::2, 1:],
    "expanded": VALUES[:, :1].expand(4, 3, 6),
    "one row": VALUES[:1].transpose(0, 1),
    "scalar": VALUES[0, 0, 0],
    "empty": VALUES[:0],
}


@pytest.mark.parametrize("name", FORMS)
def test_a_copy_has_values_and_layout(name: str) -> None:
    tensor = FORMS[name]
    copy = with_layout(tensor.clone(memory_format=torch.contiguous_format), *layout_of(tensor))
    assert torch.equal(copy, tensor)
    assert layout_of(copy) == layout_of(tensor)
    assert not copy._is_view()  # stages change received tensors in place
