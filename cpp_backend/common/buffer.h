// Flat memory that an operation reads or writes.
#pragma once

#include <cstddef>

#include "common/dtype.h"

namespace tagi_ddp {

struct Buffer {
    void* data = nullptr;
    size_t count = 0;  // of elements
    DType dtype = DType::u8;

    size_t bytes() const { return count * size_of(dtype); }
    std::byte* byte_data() const { return static_cast<std::byte*>(data); }
};

}  // namespace tagi_ddp
