"""The kernels room: the few operations worth writing by hand, each beside a plain-torch reference."""
