#include "update/compress.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/simd.h"

namespace tagi_ddp {
namespace {

constexpr float greatest = 3e38f;  // rounds to a finite number
constexpr float least = 1e-37f;    // has a finite inverse
constexpr size_t block_bytes = sizeof(float) + compress_block;

TAGI_DDP_WIDE
void compress_8(float* values, uint8_t* bytes) {
    float largest = 0;
    for (size_t i = 0; i < compress_block; ++i) {
        if (!(std::fabs(values[i]) <= greatest)) values[i] = 0;
        largest = std::max(largest, std::fabs(values[i]));
    }
    const float scale = largest / 127;
    std::memcpy(bytes, &scale, sizeof scale);
    const float inverse = scale > least ? 1 / scale : 0;
    for (size_t i = 0; i < compress_block; ++i) {
        const float number = std::nearbyint(values[i] * inverse);
        bytes[sizeof scale + i] = static_cast<uint8_t>(static_cast<int8_t>(number));
        values[i] -= number * scale;
    }
}

TAGI_DDP_WIDE
void add_8(const uint8_t* bytes, float* values) {
    float scale = 0;
    std::memcpy(&scale, bytes, sizeof scale);
    for (size_t i = 0; i < compress_block; ++i) {
        values[i] += static_cast<float>(static_cast<int8_t>(bytes[sizeof scale + i])) * scale;
    }
}

TAGI_DDP_WIDE
void compress_16(float* values, uint8_t* bytes) {
    for (size_t i = 0; i < compress_block; ++i) {
        if (!(std::fabs(values[i]) <= greatest)) values[i] = 0;
        uint32_t bits = 0;
        std::memcpy(&bits, values + i, sizeof bits);
        bits += 0x7fff + ((bits >> 16) & 1);
        const auto half = static_cast<uint16_t>(bits >> 16);
        std::memcpy(bytes + 2 * i, &half, sizeof half);
        bits = static_cast<uint32_t>(half) << 16;
        float kept = 0;
        std::memcpy(&kept, &bits, sizeof kept);
        values[i] -= kept;
    }
}

TAGI_DDP_WIDE
void add_16(const uint8_t* bytes, float* values) {
    for (size_t i = 0; i < compress_block; ++i) {
        uint16_t half = 0;
        std::memcpy(&half, bytes + 2 * i, sizeof half);
        const uint32_t bits = static_cast<uint32_t>(half) << 16;
        float value = 0;
        std::memcpy(&value, &bits, sizeof value);
        values[i] += value;
    }
}

}  // namespace

size_t compressed_bytes(size_t count, int bits) {
    return bits == 8 ? count / compress_block * block_bytes : 2 * count;
}

void compress(float* values, size_t count, int bits, uint8_t* bytes) {
    const size_t step = compressed_bytes(compress_block, bits);
    for (size_t done = 0; done < count; done += compress_block, bytes += step) {
        bits == 8 ? compress_8(values + done, bytes) : compress_16(values + done, bytes);
    }
}

void add_decompressed(const uint8_t* bytes, size_t count, int bits, float* values) {
    const size_t step = compressed_bytes(compress_block, bits);
    for (size_t done = 0; done < count; done += compress_block, bytes += step) {
        bits == 8 ? add_8(bytes, values + done) : add_16(bytes, values + done);
    }
}

}  // namespace tagi_ddp
