"""Fewer bits between devices.

wire_formats          names of the block formats in which arrays travel
codec                 arrays as bytes in such a format, and back
quantized_exchange    an exchange that sends parameters and gradients as such bytes
quantized_gather      a gather that quantizes parameters by rules, for the products that take them
compressors           signs, the largest values, levels by chance: gradients as fewer bytes, one class each
"""
