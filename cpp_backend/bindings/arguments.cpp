#include "bindings/arguments.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <utility>

namespace nb = nanobind;

namespace tagi_ddp {
namespace {

std::optional<DType> as_dtype(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    constexpr std::pair<Code, uint8_t> types[] = {
        {Code::Float, 16}, {Code::Bfloat, 16}, {Code::Float, 32}, {Code::Float, 64},
        {Code::Int, 8},    {Code::Int, 16},    {Code::Int, 32},   {Code::Int, 64},
        {Code::UInt, 8},   {Code::UInt, 16},   {Code::UInt, 32},  {Code::UInt, 64}};  // as in DType
    for (size_t i = 0; i < std::size(types) && dtype.lanes == 1; ++i) {
        const auto& [code, bits] = types[i];
        if (dtype.code == static_cast<uint8_t>(code) && dtype.bits == bits) {
            return static_cast<DType>(i);
        }
    }
    return std::nullopt;
}

// Calls the function that checks arguments of communicators in Python too.
template <typename... Arguments>
nb::object checked(const char* module, const char* function, Arguments&&... arguments) {
    return nb::module_::import_(module).attr(function)(arguments...);
}

constexpr const char* of_all = "tagi_ddp.checks";
constexpr const char* of_communicators = "tagi_ddp.communicators.buffers";

bool is_contiguous(const nb::ndarray<nb::ro>& array) {
    int64_t expected = 1;
    if (array.size() == 0) return true;
    for (size_t i = array.ndim(); i-- > 0;) {
        if (array.shape(i) != 1 && array.stride(i) != expected) return false;
        expected *= static_cast<int64_t>(array.shape(i));
    }
    return true;
}

}  // namespace

Array as_array(nb::handle object, const char* argument, bool writable) {
    const std::string name = argument;
    Array array;
    if (!nb::try_cast(object, array.owner, false)) {
        const auto type = nb::cast<std::string>(object.type().attr("__name__"));
        throw nb::type_error((name + " is a " + type +
                              " that gives no numeric array; pass a numpy array or a torch tensor")
                                 .c_str());
    }
    if (array.owner.device_type() != nb::device::cpu::value) {
        throw nb::type_error((name + " is not in host memory, but the communicator's device is "
                                     "\"cpu\"; copy it to the host first")
                                 .c_str());
    }
    const auto dtype = as_dtype(array.owner.dtype());
    if (!dtype) {
        throw nb::type_error((name + " has a dtype that cannot be sent; use float16, bfloat16, "
                                     "float32, float64 or an integer of 8 to 64 bits")
                                 .c_str());
    }
    if (!is_contiguous(array.owner)) {
        throw std::invalid_argument(
            name +
            " is not C-contiguous; pass a contiguous copy, as numpy.ascontiguousarray makes");
    }
    array.buffer = {const_cast<void*>(array.owner.data()), array.owner.size(), *dtype};
    if (reinterpret_cast<uintptr_t>(array.buffer.data) % size_of(*dtype) != 0) {
        throw std::invalid_argument(name + " is not aligned to its dtype; pass a copy");
    }
    nb::ndarray<> writable_view;
    if (writable && !nb::try_cast(object, writable_view, false)) {
        throw std::invalid_argument(name + " is read-only, but is written to; pass a copy");
    }
    return array;
}

void require(const Array& array, const char* argument, size_t count, DType dtype) {
    if (array.buffer.dtype != dtype) {
        throw std::invalid_argument(std::string(argument) + " has dtype " +
                                    name_of(array.buffer.dtype) + ", expected " + name_of(dtype));
    }
    if (array.buffer.count != count) {
        throw std::invalid_argument(std::string(argument) + " has " +
                                    std::to_string(array.buffer.count) + " elements, expected " +
                                    std::to_string(count));
    }
}

void require_apart(const Array& buffer, const Array& out) {
    const std::byte* a = buffer.buffer.byte_data();
    const std::byte* b = out.buffer.byte_data();
    const bool same = a == b && buffer.buffer.bytes() == out.buffer.bytes();
    if (!same && a < b + out.buffer.bytes() && b < a + buffer.buffer.bytes()) {
        throw std::invalid_argument(
            "out and buffer overlap; pass memory of its own, or the same array");
    }
}

std::vector<size_t> as_counts(nb::handle object, const char* argument, int size, size_t total) {
    const std::string name = argument;
    const size_t n = static_cast<size_t>(size);
    if (object.is_none()) {
        if (total % n != 0) {
            throw std::invalid_argument("buffer has " + std::to_string(total) +
                                        " elements, which " + std::to_string(n) +
                                        " ranks cannot share evenly; give " + name);
        }
        return std::vector<size_t>(n, total / n);
    }
    std::vector<size_t> counts;
    for (nb::handle item : object) {
        const nb::object number = checked(of_all, "integer", argument, item);
        if (!nb::try_cast(number, counts.emplace_back())) {
            const bool negative = number < nb::int_(0);
            throw std::invalid_argument(name + " holds " + nb::str(number).c_str() +
                                        (negative ? "; counts of elements are not negative"
                                                  : ", more elements than memory has"));
        }
    }
    if (counts.size() != n) {
        throw std::invalid_argument(name + " has " + std::to_string(counts.size()) +
                                    " entries, expected one for each of " + std::to_string(n) +
                                    " ranks");
    }
    return counts;
}

ReduceOp as_reduce_op(const std::string& name, DType dtype) {
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::min, ReduceOp::max}) {
        if (name != name_of(op)) continue;
        if (op == ReduceOp::mean && !is_float(dtype)) {
            throw std::invalid_argument(std::string("op is \"mean\", which is not defined for ") +
                                        name_of(dtype) + "; use \"sum\" or a float dtype");
        }
        return op;
    }
    throw std::invalid_argument("op is \"" + name +
                                "\"; use \"sum\", \"mean\", \"min\" or \"max\"");
}

int as_rank(nb::handle object, const char* argument, int size) {
    return nb::cast<int>(checked(of_all, "rank", argument, object, size));
}

int as_integer(nb::handle object, const char* argument) {
    return nb::cast<int>(checked(of_communicators, "check_integer", argument, object));
}

int as_color(nb::handle object) {
    if (object.is_none()) return -1;
    return nb::cast<int>(checked(of_communicators, "check_color", object));
}

double as_seconds(nb::handle object) {
    return nb::cast<double>(checked(of_all, "seconds", "timeout", object));
}

}  // namespace tagi_ddp
