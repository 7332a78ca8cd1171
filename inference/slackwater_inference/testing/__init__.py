"""What tests of this room share: miniature voices and folders, slow references, real server processes.

Not imported by the product.
"""
