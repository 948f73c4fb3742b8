// Arguments of the caller: arrays, numpy's or torch's, as flat buffers, and numbers.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include "common/buffer.h"

namespace tagi_ddp {

// A numpy array of float32, flat and contiguous.
using Floats =
    nanobind::ndarray<float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

// A buffer and what keeps its memory alive.
struct Array {
    Buffer buffer;
    nanobind::ndarray<nanobind::ro> owner;
};

// Throws TypeError or ValueError that names `argument`: no array, not on the host, another dtype
// than a float of 16, 32 or 64 bits or an integer of 8 to 64, not C-contiguous, not aligned,
// read-only.
Array as_array(nanobind::handle object, const char* argument, bool writable);

// Throws ValueError naming `argument` unless the array has `count` elements of `dtype`.
void require(const Array& array, const char* argument, size_t count, DType dtype);

// Throws ValueError when `out` shares memory with `buffer`, unless both are the same.
void require_apart(const Array& buffer, const Array& out);

// The counts of every rank: as given, or `total` split evenly when None. Throws ValueError.
std::vector<size_t> as_counts(nanobind::handle object, const char* argument, int size,
                              size_t total);

ReduceOp as_reduce_op(const std::string& name, DType dtype);

// These are checked in Python, as for the other communicators: TypeError or ValueError.
int as_rank(nanobind::handle object, const char* argument, int size);
int as_integer(nanobind::handle object, const char* argument);
int as_color(nanobind::handle object);       // of a split; -1 for None
double as_seconds(nanobind::handle object);  // of a timeout

}  // namespace tagi_ddp
