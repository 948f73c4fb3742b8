// Products of small matrices.
#pragma once

#include <cstddef>

namespace tagi_ddp {

// A matrix whose element (r, k) is data[r * row + k * step].
struct Factor {
    const float* data;
    size_t row;
    size_t step;
};

// What a product is added to: a row for all of its rows, [columns], padded; the rows that are there
// already; or nothing.
enum class AddTo { zero, row, present };

// out = left * right, plus what it is added to. left is [rows, depth]; right [depth, columns] and
// out [rows, columns] lie row by row, `right_row` and `out_row` floats apart. Columns come in whole
// vectors: up to padded(columns) floats of each row are read and written.
void product(size_t rows, size_t depth, size_t columns, Factor left, const float* right,
             size_t right_row, float* out, size_t out_row, AddTo add_to,
             const float* row = nullptr);

}  // namespace tagi_ddp
