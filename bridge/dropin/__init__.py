"""Signatures that serving engines call today, on jtopk: trying it is one line.

Each module is named after the engine whose functions it answers for, and says which version's
definitions it follows. Beyond the signature the promises are jtopk's: exact, ties by lowest
column, the same bits in every run, any strides, any k, any of jtopk's dtypes of at most 32 bits
natively. Arguments that speak of strides are compared with the tensor, never believed.
"""
