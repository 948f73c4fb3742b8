// Numpy's arrays as arguments of calls that take microseconds. The ndarray of nanobind uses DLPack,
// which takes three times as long.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

namespace tagi_ddp {

// A C-contiguous, aligned array in host memory, of any shape, for the duration of a call; it may be
// read-only if T is const. It is empty for None, which the argument must allow.
template <typename T>
class View {
 public:
    using Element = std::remove_const_t<T>;
    static_assert(std::is_same_v<Element, float> || std::is_same_v<Element, int32_t>);

    View() = default;
    View(View&& other) noexcept : buffer_(std::exchange(other.buffer_, {})) {}
    ~View() { PyBuffer_Release(&buffer_); }

    T* data() const { return static_cast<T*>(buffer_.buf); }
    size_t size() const { return static_cast<size_t>(buffer_.len) / sizeof(T); }
    size_t dimensions() const { return static_cast<size_t>(buffer_.ndim); }
    size_t extent(size_t dimension) const { return static_cast<size_t>(buffer_.shape[dimension]); }
    explicit operator bool() const { return buffer_.obj != nullptr; }

    // Returns true if the object is such an array; sets no Python error.
    bool take(PyObject* object) {
        constexpr int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
        if (!PyObject_CheckBuffer(object)) return false;
        if (PyObject_GetBuffer(object, &buffer_,
                               std::is_const_v<T> ? flags : flags | PyBUF_WRITABLE) != 0) {
            PyErr_Clear();
            return false;
        }
        constexpr char code = std::is_same_v<Element, float> ? 'f' : 'i';
        return buffer_.format[0] == code && buffer_.format[1] == '\0' &&
               reinterpret_cast<uintptr_t>(buffer_.buf) % sizeof(T) == 0;
    }

 private:
    Py_buffer buffer_{};
};

}  // namespace tagi_ddp

namespace nanobind::detail {

template <typename T>
struct type_caster<tagi_ddp::View<T>> {
    static constexpr bool floats = std::is_same_v<std::remove_const_t<T>, float>;

    NB_TYPE_CASTER(tagi_ddp::View<T>, const_name<floats>("numpy.typing.NDArray[numpy.float32]",
                                                         "numpy.typing.NDArray[numpy.int32]"))

    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        return source.is_none() || value.take(source.ptr());
    }
};

}  // namespace nanobind::detail
