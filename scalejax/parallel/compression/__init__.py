"""Fewer bits between devices.

wire_formats          names of the block formats in which arrays travel
codec                 arrays as bytes in such a format, and back
quantized_exchange    an exchange that sends parameters and gradients as such bytes
quantized_gather      a gather that quantizes parameters by rules, for the products that take them
two_way               sums of gradients in compressed chunks through their owners, with error feedback
arrivals              sums and all-gathers in the order of devices
compressors           one-bit, top-k, random-k, dithering, block formats: one class each
"""
