"""Running sparse models on the CPU: sparse layers and the fusion of operations around them."""
