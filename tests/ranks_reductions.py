"""What ranks run for `conformance/test_reductions.py`: every reduction over the same gradients."""

import hashlib
from collections.abc import Callable

import torch

import samestep
from ranks_loader import gathered
from samestep.parallel.reduction import Reduction, build_reduction
from samestep.parallel.tree import ShardTree
from samestep.sharding import owned_shards

World = samestep.World
Tensors = list[torch.Tensor]

NAMES = ["exact", "fast"]
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SHAPES = [(3, 4), (5,), (1,), (2, 2, 2), ()]
# Backward fills buckets from the last parameter to the first.
BUCKETS = [[4, 3], [2, 1, 0]]
TREES = [ShardTree(*case) for case in [(8, 8), (8, 64), (8, 13), (8, 3), (8, 1), (5, 5), (7, 20), (4, 4), (3, 2)]]
LENGTH = 7
LONG = 150_001  # more than a megabyte, which travels in another way than what is short


def gradients_of(shard: int, dtype: torch.dtype) -> Tensors:
    """A shard's gradients: of very different sizes, so that the order of summation shows."""
    generator = torch.Generator().manual_seed(shard)
    return [(normal(shape, generator) * 10 ** (4 * normal(shape, generator))).to(dtype) for shape in SHAPES]


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def vector_of(shard: int, length: int = LENGTH) -> torch.Tensor:
    """A shard's vector: again such that the order of summation shows."""
    generator = torch.Generator().manual_seed(1000 + shard)
    return normal((length,), generator) * 10 ** (4 * normal((length,), generator))


def filled(tree: ShardTree) -> list[int]:
    return [shard for shard in range(tree.shards) if tree.has_samples((shard, shard + 1))]


def mine(tree: ShardTree, world: World) -> list[int]:
    return [shard for shard in owned_shards(tree.shards, world.size, world.rank) if shard in filled(tree)]


class Pass:
    """One step's use of a reduction, as a strategy makes it."""

    def __init__(self, world: World, reduction: Reduction, parameters: list[torch.nn.Parameter]) -> None:
        self._world, self._reduction, self._parameters = world, reduction, parameters

    def backward(self, shard: int) -> None:
        """Add a shard's gradients to `.grad`, as autograd does."""
        for parameter, gradient in zip(self._parameters, gradients_of(shard, self._parameters[0].dtype), strict=True):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def begin(self, tree: ShardTree, *, keep_last: bool) -> int | None:
        """All backward passes; the last shard's gradients stay in `.grad` unless they are kept as well."""
        shards = mine(tree, self._world)
        for parameter in self._parameters:
            parameter.grad = None
        for shard in shards:
            self.backward(shard)
            if keep_last or shard != shards[-1]:
                self._reduction.keep(tree, shard)
        return shards[-1] if shards else None

    def by_buckets(self, tree: ShardTree) -> Tensors:
        last = self.begin(tree, keep_last=False)
        assert last is not None
        for numbers in BUCKETS:
            group = [self._parameters[number] for number in numbers]
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in group])
            for parameter, view in zip(group, self.cut(flat, group), strict=True):
                parameter.grad = view
            total = self._reduction.bucket(tree, last, group, [parameter.grad for parameter in group], flat)
            assert total.data_ptr() == flat.data_ptr()
        return self.end()

    def from_kept(self, tree: ShardTree) -> Tensors:
        self.begin(tree, keep_last=True)
        for numbers in BUCKETS:
            group = [self._parameters[number] for number in numbers]
            flat = self._reduction.kept(tree, group)
            for parameter, view in zip(group, self.cut(flat, group), strict=True):
                parameter.grad = view
        return self.end()

    def locally(self, tree: ShardTree) -> Tensors:
        last = self.begin(tree, keep_last=False)
        assert last is not None
        self._reduction.local(tree, last)
        return self.end()

    def end(self) -> Tensors:
        self._reduction.forget()
        return [parameter.grad.clone() for parameter in self._parameters]

    @staticmethod
    def cut(flat: torch.Tensor, group: list[torch.nn.Parameter]) -> Tensors:
        pieces = flat.split([parameter.numel() for parameter in group])
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, group, strict=True)]


def ways(world: World, tree: ShardTree) -> dict[str, Callable[[Pass], Tensors]]:
    """The ways to a sum that a strategy may take for a batch in a world."""
    found: dict[str, Callable[[Pass], Tensors]] = {"kept": lambda step: step.from_kept(tree)}
    if tree.is_shared_by_all(world.size):
        found["buckets"] = lambda step: step.by_buckets(tree)
    if world.size == 1:
        found["local"] = lambda step: step.locally(tree)
    return found


def as_bytes(tensors: Tensors) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def sums() -> list[dict[str, dict[tuple[str, str, ShardTree, str], bytes]]]:
    """By rank: sums of gradients and of vectors (of long ones a hash), by reduction, type, batch and way."""
    found: dict[str, dict[tuple[str, str, ShardTree, str], bytes]] = {"gradients": {}, "vectors": {}, "long": {}}
    with samestep.start(device="cpu") as world:
        trees = [tree for tree in TREES if tree.shards >= world.size]
        for name in NAMES:
            for called, dtype in DTYPES.items():
                parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
                step = Pass(world, build_reduction(name, world, parameters), parameters)
                for tree in trees:
                    for way, take in ways(world, tree).items():
                        found["gradients"][name, called, tree, way] = as_bytes(take(step))
            reduction = build_reduction(name, world, [])
            for tree in trees:
                given = {shard: vector_of(shard) for shard in mine(tree, world)}
                total = reduction.vector(tree, given, LENGTH)
                found["vectors"][name, "float64", tree, "vector"] = as_bytes([total])
            for tree in trees[:3]:
                given = {shard: vector_of(shard, LONG) for shard in mine(tree, world)}
                total = reduction.vector(tree, given, LONG)
                found["long"][name, "float64", tree, "vector"] = hashlib.sha256(as_bytes([total])).digest()
        return gathered(found)
