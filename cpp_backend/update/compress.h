// Floats in 8 or 16 bits, for the wire.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tagi_ddp {

// Floats of which the largest magnitude makes the scale of 8 bits.
constexpr size_t compress_block = 256;

// Bytes of `count` floats, a multiple of compress_block, in `bits`, 8 or 16. In 16 they are the
// upper halves, rounded to nearest even; in 8 a block is its scale, a float, and a signed number
// each, in 127ths of the scale.
size_t compressed_bytes(size_t count, int bits);

// `values` are left with what the bytes have dropped; what is not finite is dropped for good.
void compress(float* values, size_t count, int bits, uint8_t* bytes);

// Adds to `values` what the bytes say.
void add_decompressed(const uint8_t* bytes, size_t count, int bits, float* values);

}  // namespace tagi_ddp
