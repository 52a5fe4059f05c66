"""Communication and partitioning for several ranks; knows no model family and no plan.

  - `communicator`: broadcast, gather, all-to-all and send within a group of ranks
  - `rendezvous`: join and split torch.distributed groups
  - `uneven_split`, `token_partition`, `head_partition`, `cfg_groups`: which rank computes what, as
    numbers without tensors
  - `redistribute`, `ulysses`, `ring_attention`, `sharded_modules`: exchange and compute tensors
  - `ordered_map`: run independent pieces of work, such as decoding
  - `distributed_moments`: group norm over split samples
A family's `sharding.py` decides which of its modules are split, and how.
"""
