"""Usage: `torchrun --standalone --nproc-per-node PROCESSES with_ddp.py MARK`."""

import sys

import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from workload import BATCH_SIZE, build_dataset, build_net, build_optimizer, first_step_done


def main(mark: str) -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(build_net())
    optimizer = build_optimizer(model)
    dataset = build_dataset()
    sampler = DistributedSampler(dataset, shuffle=True)
    for inputs, targets in DataLoader(dataset, batch_size=BATCH_SIZE // dist.get_world_size(), sampler=sampler):
        optimizer.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            first_step_done(mark, dist.get_world_size())
        break
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
