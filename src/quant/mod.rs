//! One file a block format: struct, size assert, dequantise, quantise, scalar dot product.
