// The texts of errors, in the forms that tagi_ddp/communicators/errors.py describes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "shm/signature.h"

namespace tagi_ddp {

// "rank 2", "ranks 2 and 3", "ranks 1, 2 and 3".
std::string name_ranks(const std::vector<int>& ranks);

// "all_reduce".
const char* name_of(Kind kind);

// "all_reduce(float32[8], op=sum)".
std::string name_call(const Signature& signature);

// "5", "0.25".
std::string name_number(double value);

// The beginning of every error: "all_reduce #17 on rank 0 of 4 (shm): ".
std::string where_text(const std::string& operation, int rank, int size,
                       const std::string& backend);

// `last` is the last call of `ranks`, whose processes live; "" if it is not known. Empty: it is not
// known if they live.
std::string timeout_text(const std::vector<int>& ranks, double seconds,
                         const std::optional<std::string>& last = {});
std::string died_text(const std::vector<int>& ranks);
std::string closed_text(int rank);
// `ranks` made other calls, which are among `all`, than `own`.
std::string mismatch_text(const std::vector<int>& ranks, const std::vector<Signature>& all,
                          const Signature& own);

}  // namespace tagi_ddp
