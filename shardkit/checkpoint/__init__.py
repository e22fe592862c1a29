"""State in and out of sharded models and their optimizers.

    full, optimizer          whole state dicts, gathered one flat parameter at a time
    save, load, background   sharded checkpoints: each rank writes and reads its own bytes
      snapshot                 what a rank has, and under which names
      agreement                an error on one rank is an error on all
      files                    one rename makes a checkpoint visible; `latest`; old ones go
      metadata, saved          what a checkpoint says it holds, and reading any part of it
      records                  tensors as bytes, with checksums, as torch.load reads them
      optim_state              optimizer state for other pieces
      random_state             random number generators
    huggingface, safetensors weights as the Hugging Face tools keep them
    adapters                 peft's adapters: which tensors they are, and under which names
    convert, foreign         from one form to another, one tensor at a time
    inspection               what is in a checkpoint
    torch_state              the answer to torch's get_optimizer_state_dict

`import shardkit` imports this package, and torch.distributed.checkpoint only when a checkpoint is read or written.
"""
