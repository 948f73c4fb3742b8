#include "shm/texts.h"

#include <sstream>

#include "common/dtype.h"

namespace tagi_ddp {

std::string name_ranks(const std::vector<int>& ranks) {
    if (ranks.size() == 1) return "rank " + std::to_string(ranks.front());
    std::string text = "ranks ";
    for (size_t i = 0; i < ranks.size(); ++i) {
        if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
        text += std::to_string(ranks[i]);
    }
    return text;
}

std::string name_call(const Signature& signature) {
    constexpr const char* names[] = {"nothing",        "all_reduce", "broadcast",   "all_gather",
                                     "reduce_scatter", "all_to_all", "barrier",     "split",
                                     "empty",          "step",       "sharded_step"};
    const auto kind = static_cast<size_t>(signature.kind);
    const std::string name = kind < sizeof names / sizeof *names ? names[kind] : "unknown";
    const std::string elements = std::string(name_of(static_cast<DType>(signature.dtype))) + "[" +
                                 std::to_string(signature.count) + "]";
    const auto op = static_cast<ReduceOp>(signature.op);
    switch (signature.kind) {
        case Kind::all_reduce:
        case Kind::reduce_scatter:
            return name + "(" + elements + ", op=" + name_of(op) + ")";
        case Kind::broadcast:
            return name + "(" + elements + ", root=" + std::to_string(signature.root) + ")";
        case Kind::all_to_all:
            return name + "(" + name_of(static_cast<DType>(signature.dtype)) + ")";
        case Kind::all_gather:
        case Kind::allocate:
        case Kind::step:
            return name + "(" + elements + ")";
        default:
            return name + "()";
    }
}

std::string name_number(double value) {
    std::ostringstream text;
    text << value;
    return text.str();
}

std::string where_text(const std::string& operation, int rank, int size,
                       const std::string& backend) {
    return operation + " on rank " + std::to_string(rank) + " of " + std::to_string(size) + " (" +
           backend + "): ";
}

std::string timeout_text(const std::vector<int>& ranks, double seconds) {
    const bool one = ranks.size() == 1;
    return name_ranks(ranks) + " did not come within " + name_number(seconds) + " s. Look at " +
           (one ? "its" : "their") + " output; raise timeout= if " + (one ? "it is" : "they are") +
           " only slow.";
}

std::string died_text(const std::vector<int>& ranks) {
    return name_ranks(ranks) + " died. Look at " + (ranks.size() == 1 ? "its" : "their") +
           " output for the first error.";
}

std::string closed_text(int rank) {
    return "rank " + std::to_string(rank) +
           " has closed its communicator. Make the same calls on all ranks before close().";
}

std::string mismatch_text(const std::vector<std::pair<int, std::string>>& others,
                          const std::string& own) {
    std::string text;
    for (const auto& [rank, call] : others) {
        text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " called " + call;
        if (call == own)
            text +=
                " with other counts, for another purpose, or with a buffer at another place of its "
                "own memory";
    }
    return text + ", this rank " + own +
           ". Make the same calls in the same order with fitting arguments on all ranks.";
}

}  // namespace tagi_ddp
