"""Memory layout of tensors that pass from stage to stage."""

import pytest
import torch

from samestep.strategies.pipeline.messages import ReceivedTensor, SentTensor, contiguous_layout, layout_of, with_layout

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
    copy = with_layout(tensor.contiguous(), layout_of(tensor))
    assert torch.equal(copy, tensor)
    assert layout_of(copy) == layout_of(tensor)
    assert not copy._is_view()  # stages change received tensors in place


@pytest.mark.parametrize("shape", [(), (3,), (4, 5), (2, 1, 3), (0, 3), (3, 0)])
def test_layout_of_new_tensors(shape: tuple[int, ...]) -> None:
    assert contiguous_layout(torch.Size(shape)) == layout_of(torch.empty(shape))


def test_gradients_get_their_layout_on_the_way_back() -> None:
    transposed, expanded = layout_of(torch.empty(5, 4).t()), layout_of(torch.empty(1, 5).expand(4, 5))
    observed: list[torch.Tensor] = []
    gradients: list[torch.Tensor] = []
    source = torch.randn(5, 4, requires_grad=True).t().mul(1)
    source.register_hook(gradients.append)
    sent = SentTensor.apply(source, expanded)
    assert sent.is_contiguous()
    received = sent.detach().requires_grad_()
    inside = ReceivedTensor.apply(received, transposed, observed.append)
    assert layout_of(inside) == transposed
    inside.sum(dim=0).backward(torch.arange(5.0))
    assert received.grad is not None
    assert received.grad.is_contiguous()
    sent.backward(received.grad)
    assert [layout_of(gradient) for gradient in observed + gradients] == [expanded, expanded]
    assert torch.equal(gradients[0], torch.arange(5.0).expand(4, 5))
