//! Reading whole results of the daemon's own queries: every batch of a cursor, in order.

use bson::raw::{RawBsonRef, RawDocument, RawDocumentBuf};
use bson::rawdoc;
use halocline_cluster::{ClusterError, Conn, Reply};

/// Runs a `find` or `aggregate` and returns every document with the last reply, whose
/// `$clusterTime` is no older than any of them.
///
/// # Errors
/// Whatever the server or the connection reports.
pub async fn find_all(
    connection: &mut Conn,
    db: &str,
    command: &RawDocument,
) -> Result<(Vec<RawDocumentBuf>, Reply), ClusterError> {
    let mut documents = Vec::new();
    let mut reply = connection.run(db, command).await?;
    let mut cursor = append_batch(&reply, "firstBatch", &mut documents);
    while let Some((id, collection)) = cursor {
        let mut more = rawdoc! { "getMore": id, "collection": collection };
        // A read concern with a session or a time belongs to the cursor already; only the
        // session must be named again.
        if let Ok(Some(RawBsonRef::Document(lsid))) = command.get("lsid") {
            more.append(bson::cstr!("lsid"), lsid.to_owned());
        }
        reply = connection.run(db, &more).await?;
        cursor = append_batch(&reply, "nextBatch", &mut documents);
    }
    Ok((documents, reply))
}

/// Appends a batch; returns the cursor and its collection if there is more.
fn append_batch(
    reply: &Reply,
    batch: &str,
    documents: &mut Vec<RawDocumentBuf>,
) -> Option<(i64, String)> {
    let cursor = reply.get("cursor")?.as_document()?;
    if let Ok(Some(RawBsonRef::Array(array))) = cursor.get(batch) {
        let batch = array.into_iter().map_while(Result::ok);
        documents.extend(batch.filter_map(|d| d.as_document().map(ToOwned::to_owned)));
    }
    let id = cursor.get_i64("id").ok().filter(|id| *id != 0)?;
    let ns = cursor.get_str("ns").ok()?;
    let collection = ns.split_once('.').map_or(ns, |(_, coll)| coll);
    Some((id, collection.to_owned()))
}
