"""One copy of the base weights for a server, which exports them, and trainers, which import them, on one device.

`sharing` is the way in. `manifest` has the records, `rendezvous` the Unix socket on which the two meet, `memory` the
main memory and `cuda` the memory of a GPU that both map. It goes with the last process that maps it, however that ends.
"""
