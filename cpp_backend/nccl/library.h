// A shared library opened at run time.
#pragma once

#include <memory>
#include <string>

namespace tagi_ddp {

class Library {
 public:
    // Throws std::runtime_error with the dynamic loader's own text.
    explicit Library(const std::string& path);

    const std::string& path() const { return path_; }

    // Sets `function` to the symbol; throws std::runtime_error naming it if it is missing.
    template <typename Function>
    void get(Function*& function, const char* name) const {
        function = reinterpret_cast<Function*>(require(name));
    }
    // Null if it is missing.
    template <typename Function>
    void look_up(Function*& function, const char* name) const {
        function = reinterpret_cast<Function*>(find(name));
    }

 private:
    struct Close {
        void operator()(void* handle) const;
    };
    void* find(const char* name) const;
    void* require(const char* name) const;

    std::string path_;
    std::unique_ptr<void, Close> handle_;
};

}  // namespace tagi_ddp
