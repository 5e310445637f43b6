//! One look at one key on the fast tier, in one snapshot: is it there, and does a filter hold?

use bson::raw::RawDocument;
use bson::rawdoc;
use halocline_cluster::Tier;
use halocline_tiering::key::Key;
use halocline_tiering::time::ClusterTime;

use crate::execute::Engine;
use crate::execute::candidates::only_this;
use crate::execute::faultin::query;
use crate::execute::refusal::Refusal;
use crate::shared::Collection;

/// The conditions to look at.
pub(crate) struct Look<'a> {
    pub(crate) filter: &'a RawDocument,
    pub(crate) collation: Option<&'a RawDocument>,
    /// `let` of the command.
    pub(crate) variables: Option<&'a RawDocument>,
}

/// What the fast tier showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Seen {
    NotThere,
    ThereAndFails,
    ThereAndHolds,
}

impl Engine {
    /// Looks, and says as of when.
    pub(crate) async fn look_once(
        &self,
        collection: &Collection,
        key: &Key,
        look: &Look<'_>,
    ) -> Result<(Seen, ClusterTime), Refusal> {
        let mut command = rawdoc! {
            "aggregate": collection.ns.coll(),
            "pipeline": [
                { "$match": only_this(key, look.collation)? },
                { "$facet": {
                    "there": [{ "$project": { "_id": 1 } }],
                    "holds": [{ "$match": look.filter.to_owned() }, { "$project": { "_id": 1 } }],
                } },
            ],
            "cursor": {},
        };
        if let Some(collation) = look.collation {
            command.append(bson::cstr!("collation"), collation.to_owned());
        }
        if let Some(variables) = look.variables {
            command.append(bson::cstr!("let"), variables.to_owned());
        }
        let (found, at) = query(self.context(), Tier::Fast, collection.ns.db(), command).await?;
        let any = |name: &str| {
            found
                .first()
                .and_then(|facets| facets.get_array(name).ok())
                .is_some_and(|a| !a.is_empty())
        };
        let seen = match (any("there"), any("holds")) {
            (false, _) => Seen::NotThere,
            (true, false) => Seen::ThereAndFails,
            (true, true) => Seen::ThereAndHolds,
        };
        Ok((seen, at))
    }
}
