// The codecs that send floats in 8 or 16 bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tagi_ddp {

// The number of floats that share a scale in 8 bits.
constexpr size_t compress_block = 256;

// The bytes of `count` floats, a multiple of compress_block, in 8 or 16 bits each. In 16 bits a
// float is its upper half, rounded to nearest even. In 8 bits a block is its scale, a float, which
// is 1/127 of the largest magnitude, followed by a signed multiple of the scale for each float.
size_t compressed_bytes(size_t count, int bits);

// Leaves the rounding errors in `values`; values that are not finite become 0 in both.
void compress(float* values, size_t count, int bits, uint8_t* bytes);

// Adds the floats in `bytes` to `values`.
void add_decompressed(const uint8_t* bytes, size_t count, int bits, float* values);

}  // namespace tagi_ddp
