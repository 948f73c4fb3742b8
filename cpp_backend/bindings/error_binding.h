// The Python face of CommunicatorError.
#pragma once

namespace tagi_ddp {

// Lets Python see the typed errors of tagi_ddp.communicators.errors.
void bind_errors();

}  // namespace tagi_ddp
