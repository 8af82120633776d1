"""Reaches unmodified scripts: functions that run when a process under `reprieve run` imports a module."""
