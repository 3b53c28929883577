"""The vLLM engine: in this process, or served by another one."""
