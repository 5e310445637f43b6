//! Inserts into tiered collections: absence on both tiers is proved first (protocol rules 19, 20);
//! then the client's own command runs on the fast tier, which finds duplicates by itself.

use std::sync::Arc;

use halocline_tiering::key::{Key, KeyError};
use halocline_wire::codes;

use crate::execute::faultin::settle;
use crate::execute::forward::repeat_of;
use crate::execute::refusal::Refusal;
use crate::execute::{Answer, Engine, Request};
use crate::shared::Collection;

impl Engine {
    /// An `insert` of any number of documents.
    pub(crate) async fn insert(
        &self,
        request: &Request<'_>,
        collection: &Arc<Collection>,
    ) -> Result<Answer, Refusal> {
        let keys = self.inserted_keys(request)?;
        loop {
            let proved = std::time::Instant::now();
            settle(&self.context, collection, &keys, &request.deadline).await?;
            // A key that is only on the archive has been brought here, so the server itself answers
            // the duplicate error, in its own words and in the right order.
            let bytes = self.bytes_for_fast(request)?;
            if proved.elapsed() >= self.context.shared.proof_age() {
                // Proofs of the first keys are too old by now; those of a single batch never are.
                if request.deadline.has_passed() {
                    return Err(Refusal::timed_out("proof that the documents are new"));
                }
                continue;
            }
            let reply = self.send_write(request, &bytes, repeat_of(request.command, false)).await?;
            return Ok(self.written(request, reply, "insert"));
        }
    }

    /// The keys of the documents an `insert` carries.
    pub(crate) fn inserted_keys(&self, request: &Request<'_>) -> Result<Vec<Key>, Refusal> {
        // The server refuses what is no list of documents, in its own words.
        let Ok(documents) = request.command.documents("documents") else { return Ok(Vec::new()) };
        let mut keys = Vec::new();
        for document in documents {
            match Key::of(document) {
                Ok(key) => keys.push(key),
                // The server gives it a fresh ObjectId.
                Err(KeyError::Missing) => {}
                Err(error) => return Err(Refusal::new(codes::BAD_VALUE, error.to_string())),
            }
        }
        Ok(keys)
    }
}
