#include "nccl/library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace tagi_ddp {

Library::Library(const std::string& path)
    : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (!handle_) throw std::runtime_error(dlerror());
}

void Library::Close::operator()(void* handle) const { dlclose(handle); }

Library::Symbol Library::find(const char* name) const { return {dlsym(handle_.get(), name)}; }

Library::Symbol Library::require(const char* name) const {
    const Symbol symbol = find(name);
    if (symbol.address == nullptr) throw std::runtime_error(path_ + " has no function " + name);
    return symbol;
}

}  // namespace tagi_ddp
