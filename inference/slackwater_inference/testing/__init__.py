"""What tests of this room share: micro voices, engines and folders, callers, slow references, real server processes.

Not imported by the product.
"""
