"""The bare Triton kernels. Nothing is chosen here: block sizes and precision are constants of the launch."""
