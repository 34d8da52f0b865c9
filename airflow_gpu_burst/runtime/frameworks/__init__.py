"""
Checkpoints of training frameworks in a few lines each: `plain` PyTorch, `distributed` (torch.distributed.checkpoint),
`huggingface` (Trainer), `lightning`.

All they do is write into `checkpoint_folder(step)` and call `ready(step)`; a trainer may as well do that itself. A
framework is imported when its helper is called, and this package depends on none of them.

Tried on CPUs with torch 2.15.0 (two processes over gloo), transformers 5.24.0 with accelerate 1.15.0, and lightning
2.6.6; see `tests/behaviour/test_frameworks.py`. FSDP, DeepSpeed and several nodes of the latter two were not tried.
"""
