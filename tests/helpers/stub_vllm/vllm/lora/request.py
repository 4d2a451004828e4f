class LoRARequest:
    """Named, so that the scripts can import it; no test with this stub has adapters."""
