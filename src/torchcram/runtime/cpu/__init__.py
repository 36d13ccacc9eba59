"""Running sparse models on the CPU: sparse layers on our kernels, and graphs fused around them."""
