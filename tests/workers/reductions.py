"""Rank functions for `conformance/test_reductions.py`: every reduction of the same gradients."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

import torch

import samestep
from samestep.microbatches import owned_microbatches
from samestep.reduce.tree import MicrobatchTree
from samestep.strategies.fast_reduction import build_reduction
from samestep.strategies.reduction import Reduction
from workers.gathering import gathered

World = samestep.World
Tensors = list[torch.Tensor]

NAMES = ["exact", "fast"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SHAPES = [(3, 4), (5,), (1,), (2, 2, 2), ()]
# Backward fills buckets from the last parameter to the first.
BUCKETS = [[4, 3], [2, 1, 0]]
TREES = [MicrobatchTree(*case) for case in [(8, 8), (8, 64), (8, 13), (8, 3), (8, 1), (5, 5), (7, 20), (4, 4), (3, 2)]]
LENGTH = 7
LONG = 150_001  # more than a megabyte: another algorithm than for short vectors


def gradients_of(microbatch: int, dtype: torch.dtype) -> Tensors:
    """Return the gradients of a microbatch, of very different sizes: the order of summation changes the bits."""
    generator = torch.Generator().manual_seed(microbatch)
    return [(normal(shape, generator) * 10 ** (4 * normal(shape, generator))).to(dtype) for shape in SHAPES]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def vector_of(microbatch: int, length: int = LENGTH) -> torch.Tensor:
    """Return the vector of a microbatch, for which the order of summation changes the bits."""
    generator = torch.Generator().manual_seed(1000 + microbatch)
    return normal((length,), generator) * 10 ** (4 * normal((length,), generator))


def filled(tree: MicrobatchTree) -> list[int]:
    return [microbatch for microbatch in range(tree.microbatches) if tree.has_samples((microbatch, microbatch + 1))]


def own_microbatches(tree: MicrobatchTree, world: World) -> list[int]:
    return [
        microbatch
        for microbatch in owned_microbatches(tree.microbatches, world.size, world.rank)
        if microbatch in filled(tree)
    ]


class Step:
    """Use of a reduction in one step of a strategy."""

    def __init__(self, world: World, reduction: Reduction, parameters: list[torch.nn.Parameter]) -> None:
        self._world, self._reduction, self._parameters = world, reduction, parameters

    def backward(self, microbatch: int) -> None:
        """Add the gradients of a microbatch to `.grad`, as autograd does."""
        for parameter, gradient in zip(
            self._parameters, gradients_of(microbatch, self._parameters[0].dtype), strict=True
        ):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def begin(self, tree: MicrobatchTree, *, accumulate_last: bool) -> int | None:
        """Compute all backwards; with `accumulate_last`, the last gradients are accumulated too.

        Returns:
            The last microbatch of this rank, if any.
        """
        microbatches = own_microbatches(tree, self._world)
        for parameter in self._parameters:
            parameter.grad = None
        for microbatch in microbatches:
            self.backward(microbatch)
            if accumulate_last or microbatch != microbatches[-1]:
                self._reduction.accumulate(tree, microbatch)
        return microbatches[-1] if microbatches else None

    def by_buckets(self, tree: MicrobatchTree) -> Tensors:
        last = self.begin(tree, accumulate_last=False)
        assert last is not None
        for numbers in BUCKETS:
            group = [self._parameters[number] for number in numbers]
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in group])
            for parameter, view in zip(group, self.split(flat, group), strict=True):
                parameter.grad = view
            total = self._reduction.reduce_bucket(tree, last, group, flat)
            assert total.data_ptr() == flat.data_ptr()
        return self.end()

    def from_accumulated(self, tree: MicrobatchTree) -> Tensors:
        self.begin(tree, accumulate_last=True)
        for numbers in BUCKETS:
            group = [self._parameters[number] for number in numbers]
            flat = self._reduction.reduce_accumulated(tree, group)
            for parameter, view in zip(group, self.split(flat, group), strict=True):
                parameter.grad = view
        return self.end()

    def locally(self, tree: MicrobatchTree) -> Tensors:
        last = self.begin(tree, accumulate_last=False)
        assert last is not None
        self._reduction.reduce_local(tree, last)
        return self.end()

    def end(self) -> Tensors:
        self._reduction.clear()
        return [parameter.grad.clone() for parameter in self._parameters]

    @staticmethod
    def split(flat: torch.Tensor, group: list[torch.nn.Parameter]) -> Tensors:
        values = flat.split([parameter.numel() for parameter in group])
        return [value.view_as(parameter) for value, parameter in zip(values, group, strict=True)]


def methods(world: World, tree: MicrobatchTree) -> dict[str, Callable[[Step], Tensors]]:
    """Return the methods with which a strategy can reduce a batch."""
    methods: dict[str, Callable[[Step], Tensors]] = {"accumulated": lambda step: step.from_accumulated(tree)}
    if tree.is_shared_by_all(world.size):
        methods["buckets"] = lambda step: step.by_buckets(tree)
    if world.size == 1:
        methods["local"] = lambda step: step.locally(tree)
    return methods


def as_bytes(tensors: Tensors) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def staged(world: World) -> World:
    """Return the world with messages through copies, as of ranks that share a GPU."""
    copied = replace(world)
    vars(copied)["stages_messages"] = True
    assert copied.stages_messages and not world.stages_messages
    return copied


def sums() -> list[dict[str, dict[tuple[str, str, MicrobatchTree, str], bytes]]]:
    """Return sums of gradients and vectors (hashes of long ones), by rank, reduction, dtype, batch and method."""
    results: dict[str, dict[tuple[str, str, MicrobatchTree, str], bytes]] = {"gradients": {}, "vectors": {}, "long": {}}
    with samestep.start(device="cpu") as world:
        trees = [tree for tree in TREES if tree.microbatches >= world.size]
        for name in NAMES:
            for dtype_name, dtype in DTYPES.items():
                parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
                step = Step(world, build_reduction(name, world, parameters), parameters)
                for tree in trees:
                    for method, reduce in methods(world, tree).items():
                        results["gradients"][name, dtype_name, tree, method] = as_bytes(reduce(step))
            for method, messages in {"vector": world, "staged": staged(world)}.items():
                reduction = build_reduction(name, messages, [])
                for tree in trees:
                    vectors = {(m, m + 1): vector_of(m) for m in own_microbatches(tree, world)}
                    total = reduction.reduce_vector(tree, vectors, LENGTH)
                    results["vectors"][name, "float64", tree, method] = as_bytes([total])
                for tree in trees[:3]:
                    vectors = {(m, m + 1): vector_of(m, LONG) for m in own_microbatches(tree, world)}
                    total = reduction.reduce_vector(tree, vectors, LONG)
                    results["long"][name, "float64", tree, method] = hashlib.sha256(as_bytes([total])).digest()
        return gathered(results)
