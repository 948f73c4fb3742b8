#include "shm/texts.h"

#include <sstream>

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

const char* name_of(Kind kind) {
    constexpr const char* names[] = {"nothing",        "all_reduce", "broadcast", "all_gather",
                                     "reduce_scatter", "all_to_all", "barrier",   "split",
                                     "empty",          "step"};
    const auto index = static_cast<size_t>(kind);
    return index < std::size(names) ? names[index] : "unknown";
}

std::string name_call(const Signature& signature) {
    const std::string name = name_of(signature.kind);
    const std::string elements =
        std::string(name_of(signature.dtype)) + "[" + std::to_string(signature.count) + "]";
    switch (signature.kind) {
        case Kind::all_reduce:
        case Kind::reduce_scatter:
            return name + "(" + elements + ", op=" + name_of(signature.op) + ")";
        case Kind::broadcast:
            return name + "(" + elements + ", root=" + std::to_string(signature.root) + ")";
        case Kind::all_to_all:
            return name + "(" + name_of(signature.dtype) + ")";
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

std::string timeout_text(const std::vector<int>& ranks, double seconds,
                         const std::optional<std::string>& last) {
    const bool one = ranks.size() == 1;
    const std::string its = one ? "its" : "their";
    std::string lives;
    if (last) lives = "; " + its + (one ? " process lives" : " processes live");
    if (last && !last->empty()) lives += ", and " + its + " last call was " + *last;
    return name_ranks(ranks) + " did not come within " + name_number(seconds) + " s" + lives +
           ". Look at " + its + " output; if " + (one ? "it is" : "they are") +
           " only slow, raise timeout= of DDPConfig.from_env or init.";
}

std::string died_text(const std::vector<int>& ranks) {
    return name_ranks(ranks) + " died. Look at " + (ranks.size() == 1 ? "its" : "their") +
           " output for the first error.";
}

std::string closed_text(int rank) {
    return "rank " + std::to_string(rank) +
           " has closed its communicator. Make the same calls on all ranks before close().";
}

std::string mismatch_text(const std::vector<int>& ranks, const std::vector<Signature>& all,
                          const Signature& own) {
    const std::string own_call = name_call(own);
    std::string text;
    for (int rank : ranks) {
        const std::string call = name_call(all[static_cast<size_t>(rank)]);
        text += (text.empty() ? "rank " : ", rank ") + std::to_string(rank) + " called " + call;
        if (call == own_call) {
            text +=
                " with other counts, for another purpose, or with a buffer at another offset in "
                "its "
                "own memory";
        }
    }
    return text + ", this rank " + own_call +
           ". Make the same calls in the same order with fitting arguments on all ranks.";
}

}  // namespace tagi_ddp
