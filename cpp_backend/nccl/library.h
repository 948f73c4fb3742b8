// A shared library opened at run time.
#pragma once

#include <memory>
#include <string>

namespace tagi_ddp {

class Library {
 public:
    // Converts to a pointer to a function of any type.
    struct Symbol {
        void* address;

        template <typename Function>
        operator Function*() const {
            return reinterpret_cast<Function*>(address);
        }
    };

    // Throws std::runtime_error with the text of the dynamic loader.
    explicit Library(const std::string& path);

    const std::string& path() const { return path_; }
    // Throws std::runtime_error that names the function if it is missing.
    Symbol require(const char* name) const;
    // Null if the function is missing.
    Symbol find(const char* name) const;

 private:
    struct Close {
        void operator()(void* handle) const;
    };

    std::string path_;
    std::unique_ptr<void, Close> handle_;
};

}  // namespace tagi_ddp
