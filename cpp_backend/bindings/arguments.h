// The conversion of arguments: numpy's or torch's arrays to flat buffers, and numbers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <vector>

#include "common/buffer.h"

namespace tagi_ddp {

// A numpy array of float32, flat and contiguous.
using Floats =
    nanobind::ndarray<float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// A buffer and the owner of its memory.
struct Array {
    Buffer buffer;
    nanobind::ndarray<nanobind::ro> owner;
};

// Throws TypeError or ValueError that names `argument` unless it is an array of floats of 16 to 64
// bits or integers of 8 to 64, in host memory, C-contiguous, aligned, and, if asked, writable.
Array as_array(nanobind::handle object, const char* argument, bool writable);

// Throws ValueError that names `argument` unless the array has `count` elements of `dtype`.
void require(const Array& array, const char* argument, size_t count, DType dtype);

// Throws ValueError if `out` and `buffer` overlap, but are not the same memory.
void require_apart(const Array& buffer, const Array& out);

// Returns the counts of all ranks; for None, `total` divided evenly. Throws ValueError.
std::vector<size_t> as_counts(nanobind::handle object, const char* argument, int size,
                              size_t total);

ReduceOp as_reduce_op(const std::string& name, DType dtype);

// Python checks these, as for the other communicators, and raises TypeError or ValueError.
int as_rank(nanobind::handle object, const char* argument, int size);
int as_integer(nanobind::handle object, const char* argument);
int as_color(nanobind::handle object);       // of a split; -1 for None
double as_seconds(nanobind::handle object);  // of a timeout

}  // namespace tagi_ddp
