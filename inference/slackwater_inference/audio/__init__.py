"""Sound outside the model: recordings read and checked, speech shaped and encoded for the client.

Owns containers, rates, tempo and loudness.  Owns no code of the model's.
"""
