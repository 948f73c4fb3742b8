// Hashes that do not depend on the standard library, so they are equal on all ranks.
#pragma once

#include <cstdint>
#include <type_traits>

namespace tagi_ddp {

// 64-bit FNV-1a over whole values instead of bytes.
template <typename Values>
uint64_t hash_of(const Values& values) {
    using Value = std::make_unsigned_t<typename Values::value_type>;
    uint64_t hash = 1469598103934665603ull;
    for (auto value : values) hash = (hash ^ static_cast<Value>(value)) * 1099511628211ull;
    return hash;
}

}  // namespace tagi_ddp
