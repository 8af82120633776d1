"""How unmodified scripts are reached: hooks that run when a process under `reprieve run` imports a module."""
